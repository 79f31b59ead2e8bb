"""The stubs say what the module has."""

import subprocess
import sys


def test_the_stubs_match_the_module():
    command = [sys.executable, "-m", "mypy.stubtest", "orbitkv", "--concise"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
