"""The error of a question that this machine cannot answer."""


class NotPossible(RuntimeError):
    """Say why something cannot be done here and what would make it possible.

    The command line exits 77 on it. `.reason` and `.remedy` are one line each.
    """

    def __init__(self, reason, remedy):
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy

    def __reduce__(self):
        return type(self), (self.reason, self.remedy)
