"""Preparations that are killed: a process that imports everything once, and forks one for each of them."""

import json
import subprocess
import sys
from contextlib import contextmanager

SCRIPT = """
import json, os, sys
from fastweights.data.prepare import prepare
kind, source, out, options = sys.argv[1:]
for line in sys.stdin:
    process = os.fork()
    if not process:
        left = iter(range(int(line)))
        report = lambda stage, fraction: next(left, None) is None and os._exit(9)
        prepare(kind, source, out, force=True, report=report, **json.loads(options))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@contextmanager
def killed(kind, source, out, **options):
    """What prepares the corpus, ends the process with code 9 after so many reports, and returns its code."""
    command = [sys.executable, "-c", SCRIPT, kind, source, out, json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def attempt(reports):
            process.stdin.write(f"{reports}\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        yield attempt
