"""What crashes, hangs or fails in a separate process ends nothing else."""

import os
import threading
import time

import pytest

from fastweights.common.separate import ProcessFailed, SeparateProcess, StartFailed, side_by_side


def doing(times=1):
    """Return what is called in the process: with a number for that number times `times`, or with how it shall end."""

    def do(what):
        if what == "exit":
            os._exit(3)
        if what == "kill":
            os.kill(os.getpid(), 9)
        if what == "raise":
            raise ValueError("not this")
        if what == "sleep":
            time.sleep(60)
        print("what libraries print")
        return os.getpid() if what == "who" else times * what

    return do


def failing():
    raise ImportError("no such library")


def test_calls_are_made_in_one_process_until_one_fails(capfd):
    process = SeparateProcess(doing, 2)
    try:
        first = process("who")
        assert (process(4), process("who")) == (8, first) and first != os.getpid()
        with pytest.raises(ValueError, match="not this"):
            process("raise")
        assert process("who") == first, "an exception ends nothing"
        for how, message in (("exit", "ended with exit status 3"), ("kill", "ended with signal 9")):
            with pytest.raises(ProcessFailed, match=message):
                process(how)
        with pytest.raises(ProcessFailed, match="no answer in 0"):
            process("sleep", limit_s=0.2)
        assert process("who") != first
    finally:
        process.end()
    out, err = capfd.readouterr()
    assert out == "" and "what libraries print" in err


def test_a_process_that_cannot_start():
    with pytest.raises(StartFailed, match="a process could not start: ImportError: no such library"):
        SeparateProcess(failing)(1)
    with pytest.raises(StartFailed, match="a process could not start: no answer in 0 s"):
        SeparateProcess(doing, start_s=0)(1)


def test_calls_side_by_side():
    tasks = [1, "exit", 2, "raise", 3]
    found = dict(side_by_side([SeparateProcess(doing, 10) for _ in range(2)], tasks, 60))
    assert (found[1], found[2], found[3]) == (10, 20, 30)
    assert isinstance(found["exit"], ProcessFailed) and isinstance(found["raise"], ValueError)


def test_a_process_that_cannot_continue_is_replaced():
    calls = side_by_side([SeparateProcess(doing)], ["who", "who"], 60, can_continue=lambda found: False)
    assert len({found for _, found in calls}) == 2


def test_leaving_ends_what_is_still_running():
    processes, threads = [SeparateProcess(doing), SeparateProcess(doing)], threading.active_count()
    for process in processes:
        process.wait_until_ready()
    calls = side_by_side(processes, [1, "sleep"], None)
    assert next(calls) == (1, 1)
    start = time.monotonic()
    calls.close()
    assert time.monotonic() - start < 30 and threading.active_count() == threads
