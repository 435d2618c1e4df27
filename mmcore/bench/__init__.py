"""The scenarios that `mmcore bench`, `mmcore register` and benchmarks/ run: functions that return rows."""
