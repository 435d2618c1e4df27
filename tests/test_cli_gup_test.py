"""`mmcore gup-test` as users of the kernel's gup_test meet it: options, lines, errors. No time is asserted."""
import json
import re
from dataclasses import replace

import pytest
from live_support import mmcore

import mmcore as mmc
from mmcore.bench import gup_test
from mmcore.bench.gup_test import Acquired, Buffer, Options, compare, ioctl

MIB = 1 << 20
TIME = r"Time: get:\d+ put:\d+ us"


def command(*words, code=0):
    done = mmcore("gup-test", "-m", "4", *words)
    assert done.returncode == code, done.stderr or done.stdout
    assert "Traceback" not in done.stderr
    return done


def json_of(*words, code=0):
    return json.loads(command("--json", *words, code=code).stdout)


def with_buffer(options, look):
    buffer = Buffer(options)
    try:
        return look(buffer)
    finally:
        buffer.close()


# ---- lines -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("option, name", [("-a", "PIN_FAST_BENCHMARK"), ("-L", "PIN_LONGTERM_BENCHMARK"),
                                          ("-u", "GUP_FAST_BENCHMARK"),
                                          (None, "GUP_FAST_BENCHMARK")])
def test_tap_of_benchmarks(option, name):
    lines = command(*[option] if option else [], "-r", "2").stdout.splitlines()
    assert lines[:2] == ["TAP version 13", "1..1"]
    assert all(re.fullmatch(f"# {name}: {TIME}# ", line) for line in lines[2:4])
    assert lines[4:] == ["ok 1 ioctl status 0", "# Totals: pass:1 fail:0 xfail:0 xpass:0 skip:0 error:0"]


@pytest.mark.parametrize("option, name", [("-b", "PIN_BASIC_TEST"), ("-U", "GUP_BASIC_TEST"),
                                          ("-c", "DUMP_USER_PAGES_TEST")])
def test_commands_without_times_run_once(option, name):
    lines = command(option, "-r", "3").stdout.splitlines()
    assert [line for line in lines if "done" in line] == [f"# {name}: done"]


def test_plain_has_the_line_alone():
    assert re.fullmatch(f"PIN_LONGTERM_BENCHMARK: {TIME}\n", command("-L", "--plain").stdout)


def test_later_commands_override_and_threads_have_a_result_each():
    lines = command("-a", "-L", "-j", "3", "-r", "2").stdout.splitlines()
    assert lines[1] == "1..3" and sum("PIN_LONGTERM_BENCHMARK" in line for line in lines) == 6
    assert [line for line in lines if line.startswith("ok")] == [f"ok {k} ioctl status 0" for k in (1, 2, 3)]


def test_dump_names_pages_addresses_and_struct_pages():
    out = command("-ct", "-F", "0x1", "0", "19", "0x3000").stdout
    assert re.findall(r"# ---- page #(\d+), starting from user virt addr: 0x[0-9a-f]+", out) == ["0", "19"]
    assert "ZEROING due to out of range: page #12288 of 1024" in out
    assert re.search(r"# page: refcount:513 mapcount:\d+ mapping:[0-9a-f]{16} index:0x[0-9a-f]+ pfn:0x213", out)
    assert re.search(r"# head: order:9 mapcount:1 .*pincount:0",
                     out) and "page dumped because: gup_test: dump_pages() test" in out


def test_dump_with_pins():
    assert re.search(r"head: order:9 .*pincount:512", command("-ctp", "-n", "512").stdout)
    assert json_of("-c", "-p", "1")["flags"] == 1


# ---- meanings --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words", [["-n", "-1", "-a"], ["-a", "-n", "-1"]])
def test_all_pages_in_one_call_wherever_it_stands(words):
    # command() puts -m first; here it stands last as well.
    assert json_of(*words, "-m", "6")["results"][0]["size"] == 6 * MIB


@pytest.mark.parametrize("per_call, calls", [(1, 1024), (123, 9), (512, 2), (-1, 1), (5000, 1)])
def test_pages_a_call(monkeypatch, per_call, calls):
    asked = []

    def counted(mm, at, nr, flags, **options):
        asked.append(nr)
        return mmc.pin_user_pages_fast(mm, at, nr, flags, **options)

    monkeypatch.setitem(gup_test.COMMANDS, "a", ("PIN_FAST_BENCHMARK", counted, True))
    result = with_buffer(Options("a", 4 * MIB, per_call), lambda buffer: ioctl(buffer, Options("a", 4 * MIB, per_call)))
    assert len(asked) == calls and sum(asked) == 1024 and not result.short and not result.why


def test_flags():
    assert json_of("-a")["flags"] == mmc.FOLL_WRITE
    assert json_of("-a", "-W")["flags"] == 0 and json_of("-a", "-W", "-F", "0x1")["flags"] == 1
    assert json_of("-L", "-W")["flags"] == mmc.FOLL_LONGTERM
    assert json_of("-u", "-w", "-F", "0")["flags"] == 1


@pytest.mark.parametrize("words, backing, order", [
    ([], "anon", 0), (["-t"], "thp", 9), (["-T"], "anon", 0), (["-S"], "shmem", 0), (["-S", "-t"], "thp", 9),
    (["-S", "-t", "--shmem-thp", "never"], "shmem", 0), (["-H"], "hugetlb 2M", 9), (["-f", "tmpfs", "-S"], "tmpfs", 0),
    (["-f", "tmpfs", "-S", "-t"], "thp", 9), (["-f", "tmpfs"], "tmpfs", 0), (["-f", "ext4", "-S"], "ext4", 0),
    (["-f", "hugetlbfs", "-S"], "hugetlb 2M", 9), (["-f", "hugetlbfs:2M"], "hugetlb 2M", 9),
    (["-f", "hugetlbfs:1G", "-S"], "hugetlb 1G", 18), (["-f", "devdax", "-S"], "devdax 2M", 9),
    (["-f", "devdax:1G", "-S"], "devdax 1G", 18), (["-f", "/dev/zero", "-t"], "thp", 9),
])
def test_what_backs_the_buffer(words, backing, order):
    got = json_of("-a", "-n", "512", *words)
    assert got["ok"] and got["size"] == max(4 * MIB, (1 << 30) if order == 18 else 0)

    def look(buffer):
        assert buffer.backing == backing
        return buffer.mm.page_at(buffer.addr).folio.order

    options = parsed("-a", *words)
    assert with_buffer(options, look) == order


def parsed(*words):
    """Options as the command line reads them."""
    import argparse
    from mmcore.cli import gup_test as verb

    parser = argparse.ArgumentParser()
    verb.add_arguments(parser)
    args = parser.parse_args(["-m", "4", *words])
    return Options(command=args.command, size=args.mib << 20, advice=args.advice, shared=args.shared,
                   hugetlb=args.hugetlb,
                   file="" if args.file == "/dev/zero" else args.file, shmem_thp=args.shmem_thp)


def test_the_seed_line_pins_huge_pages_once_each():
    """gup_test -t -m ... -r ... -L -S -n 512 -w: shared memory with THPs, so that a call is one leaf."""
    options = Options("L", 8 * MIB, 512, advice="t", shared=True)

    def look(buffer):
        buffer.mem.reset_opstats()
        taken = Acquired(buffer, options)
        taken.get()
        assert buffer.mem.opstats()["leaf_walks"] == 4
        assert taken.verify() == []
        taken.put()
        return buffer.mem.vmstat()

    stat = with_buffer(options, look)
    assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"] == 2048


# ---- verification and errors -----------------------------------------------------------------------------------------
def test_a_page_that_is_not_pinned_is_found():
    options = Options("a", 4 * MIB, 512)

    def look(buffer):
        taken = Acquired(buffer, options)
        taken.get()
        mmc.unpin_user_pages(taken.pages[700:701])
        lines = taken.verify()
        mmc.grab_pages(taken.pages[700:701])
        taken.put()
        return lines

    lines = with_buffer(options, look)
    assert lines[0] == "pages[700] is NOT dma-pinned" and lines[-1] == "page dumped because: gup_test failure"


def test_a_page_that_must_not_be_pinned_longterm_is_found(monkeypatch):
    """A longterm pin moves pages out of Movable memory; one that did not would be seen."""
    def careless(mm, at, nr, flags, **options):
        return mmc.pin_user_pages(mm, at, nr, mmc.FOLL_WRITE, **options)

    monkeypatch.setitem(gup_test.COMMANDS, "L", ("PIN_LONGTERM_BENCHMARK", careless, True))
    options, made = Options("L", MIB, 64), mmc.Memory
    monkeypatch.setattr(mmc, "Memory", lambda size, **config: made(size, movable="200M", **config))
    result = with_buffer(options, lambda buffer: ioctl(buffer, options))
    assert result.why == "pages[0] is NOT pinnable but pinned"


@pytest.mark.parametrize("words, why", [(["-a", "-n", "0"], "0 pages a call"), (["-a", "-F", "0x40"], "FOLL_"),
                                        (["-L", "-f", "ext4", "-S"], "writeback"),
                                        (["-u", "-F", "0x80000000"], "gup_flags|FOLL|bit")])
def test_a_short_acquire_is_an_error(words, why):
    done = command(*words, code=1)
    assert ", truncated (size: 0)# " in done.stdout and "not ok 1" in done.stdout and "fail:1" in done.stdout
    assert re.search(why, done.stderr) and done.stderr.startswith("mmcore gup-test: 0 of 1024 pages acquired")


def test_a_partly_short_acquire_releases_what_it_has():
    options = Options("a", 4 * MIB, 512)

    def look(buffer):
        buffer.mm.munmap(buffer.addr + 600 * 4096, 4096)
        result = ioctl(buffer, options)
        buffer.mem.check()
        stat = buffer.mem.vmstat()
        assert stat["nr_foll_pin_acquired"] == stat["nr_foll_pin_released"]
        return result

    result = with_buffer(options, look)
    assert result.short and result.size == 600 * 4096 and result.why == "a call for 512 pages got 88"


@pytest.mark.parametrize("words", [["-z"], ["-n", "x"], ["-m", "0"], ["-m", "x"], ["-r", "0"], ["-j", "0"],
                                   ["-j", "9999"], ["-f", "/tmp/x"],
                                   ["-f", "devdax"], ["-H", "-f", "tmpfs"], ["-a", "3"], ["-F", "-1"],
                                   ["-c", *"012345678"],
                                   ["-u", "--release", "head"], ["--compare", "-c"], ["--compare", "-a", "-j", "2"],
                                   ["-c", "-5"]])
def test_usage(words):
    command(*words, code=2)


# ---- generations -----------------------------------------------------------------------------------------------------
def test_compare_has_the_generations_and_the_published_figures():
    out = command("--compare", "-L", "-t", "-S", "-n", "512", "--rounds", "3").stdout
    for text in ("get: page -> leaf", "put: page -> head", "put: page -> run", "87.6 -> 23.2 ms, 3.8x"):
        assert text in out
    got = json_of("--compare", "-a", "-n", "512", "-S", "-f", "devdax", "--rounds", "3")
    assert (got["rows"][0]["published"]["before_ms"], got["rows"][0]["published"]["after_ms"]) == (192, 9)
    assert got["rows"][1]["published"] is None and got["rounds"] == 3
    assert all(len(row["samples"]["before"]) == 3 and row["low"] <= row["ratio"] <= row["high"] for row in got["rows"])
    got = json_of("--compare", "-u", "--rounds", "1")
    assert [row["verdict"] for row in got["rows"]] == ["too few rounds"] * 2


def test_the_oldest_device_has_base_pages():
    options = Options("L", 4 * MIB, 512, file="devdax", shared=True)

    def counters(buffer, **how):
        taken = Acquired(buffer, replace(options, **how))
        taken.get()
        heads = {page.folio.pfn for page in taken.pages}
        taken.put()
        buffer.close()
        return len(heads)

    assert counters(Buffer(options)) == 2
    assert counters(Buffer(options, compound=False), acquire="page", release="page") == 1024
    assert [row["phase"] for row in compare(options, 1)["rows"]] == ["get", "put", "put"]
