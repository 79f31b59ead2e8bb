"""The stubs, and the annotations of what is written in Python, say what the modules have."""

import pkgutil
import re
import subprocess
import sys

import orbitkv

#: Neither an engine nor torch is installed here: modules that import one are for the engines' own tests.
ABSENT = {"torch", "vllm", "sglang"}
#: stubtest compares names and signatures; whether bodies type-check is not its question.
MYPY = """[mypy]
ignore_missing_imports = True
[mypy-orbitkv.*]
ignore_errors = True
"""


def modules_without_an_engine():
    """Each is imported in a process of its own: other tests put stand-ins in the engines' places here."""
    names = []
    for module in pkgutil.walk_packages(orbitkv.__path__, "orbitkv.", onerror=lambda _: None):
        done = subprocess.run([sys.executable, "-c", f"import {module.name}"], capture_output=True, text=True)
        if done.returncode != 0:
            missing = re.search(r"No module named '(\w+)[.']", done.stderr)
            assert missing and missing[1] in ABSENT, done.stderr
        elif not module.ispkg:  # stubtest would look into every module of a package
            names.append(module.name)
    return names


def test_the_stubs_match_the_modules(tmp_path):
    names = modules_without_an_engine()
    assert {"orbitkv._native", "orbitkv.link", "orbitkv.fingerprint", "orbitkv.sglang.store"} <= set(names)
    (tmp_path / "mypy.ini").write_text(MYPY)
    command = [sys.executable, "-m", "mypy.stubtest", *names, "--concise", "--mypy-config-file", tmp_path / "mypy.ini"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
