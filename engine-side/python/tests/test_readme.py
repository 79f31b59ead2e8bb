"""The example of the README runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import orbitkv
from rig import Manager

README = Path(__file__).parents[3] / "README.md"


def test_the_example_of_the_readme():
    [example] = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.S | re.M)
    manager = Manager()
    runtime = Path(manager.socket).parent
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(runtime)}
    ask = [sys.executable, "-c", "import orbitkv; print(orbitkv.socket_default_path())"]
    answer = subprocess.run(ask, env=environment, check=True, capture_output=True, text=True)
    manager.socket = answer.stdout.strip()
    assert manager.socket.startswith(str(runtime)) and manager.socket != orbitkv.socket_default_path()
    os.makedirs(os.path.dirname(manager.socket), mode=0o700)
    manager.start()
    command = [sys.executable, "-c", example]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    saved, restored = said.stdout.splitlines()
    assert "save ok" in saved and "pages=2" in saved
    assert restored == "ok True"
    manager.stop()
