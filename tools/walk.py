"""Files that real runs pass through: `python tools/walk.py` traces a training command, a step and a served request.

A visit is a change of file along the calls, in the order in which they happen; class bodies, which run at import, are
no calls. The process's calls are traced by `sys.setprofile`, which this file installs as `sitecustomize.py`. `python
tools/walk.py --story` prints the functions of a training command in the order of their first calls.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
STEP, TRAIN = "training_step", "run_training"
FEW = [
    "model=tiny",
    "hardware=cpu",
    "data.synthetic.num_train=320",
    "data.synthetic.num_val=100",
    "training.max_steps=20",
    "training.checkpoint_every=20",  # else every step of so short a run saves, and no plain one is seen
]
NUM_REQUESTS = 6


def install() -> None:
    """Trace this process, and write its walk when it ends or becomes another program."""
    import atexit
    import threading

    package = f"{ROOT / 'rm_optimizer'}{os.sep}"
    walk: list[tuple[float, str]] = []
    marks: list[tuple[str, int]] = []
    first: dict[str, None] = {}

    def on_call(frame: Any, event: str, argument: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(package) or not code.co_flags & 0x2:  # no class body
            return
        file = code.co_filename[len(package) :]
        first.setdefault(f"{file}: {code.co_qualname}")
        if not walk or walk[-1][1] != file:
            walk.append((time.monotonic(), file))
        if code.co_name in (STEP, TRAIN):
            marks.append((code.co_name, len(walk)))

    def write() -> None:
        sys.setprofile(None)
        Path(f"{os.environ['WALK']}.{os.getpid()}.json").write_text(
            json.dumps({"walk": walk, "marks": marks, "first": list(first)})
        )

    def execv(path: str, arguments: list[str], _execv: Any = os.execv) -> None:
        write()
        _execv(path, arguments)

    os.execv = execv  # type: ignore[assignment]
    atexit.register(write)
    sys.setprofile(on_call)
    threading.setprofile(on_call)


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    """A traced `rm-opt` command, whose walks go into the folder."""
    shutil.copy(__file__, folder / "sitecustomize.py")
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    variables = {"WALK": str(folder / "walk"), "WALK_ROOT": str(ROOT), "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rm_optimizer.interfaces.cli", *words]
    out = (folder / "printed").open("w")
    return subprocess.Popen(command, cwd=folder, env=os.environ | variables, stdout=out, stderr=out, text=True)


def walks(folder: Path) -> list[dict[str, Any]]:
    """Walks of the processes, the longest last."""
    return sorted((json.loads(path.read_text()) for path in folder.glob("walk.*.json")), key=lambda w: len(w["walk"]))


def show(name: str, files: list[str]) -> None:
    """Print the numbers of distinct files and of visits."""
    print(f"{name}_files: {len(set(files))}\n{name}_visits: {len(files)}")


def main() -> None:
    """Trace the runs and print the figures, one `name: value` a line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        started(folder, "train", *FEW, f"output_dir={folder / 'run'}").wait()
        found = walks(folder)
        command = next((walk for walk in found if walk["marks"]), None)
        if command is None:
            sys.exit((folder / "printed").read_text())
        files = [file for _, file in command["walk"]]
        begun = next(at for name, at in command["marks"] if name == TRAIN)
        steps = [at for name, at in command["marks"] if name == STEP]
        if "--story" in sys.argv:
            print(*command["first"], sep="\n")
            return
        show("options", files[: begun - 1])
        between = [files[start - 1 : end - 1] for start, end in itertools.pairwise(steps)]
        show("step", min(between, key=len))  # the others also evaluate or save
        show("request", request(folder))


def request(folder: Path) -> list[str]:
    """Files along one POST /rm/score in the server's process, the shortest of several."""
    for path in folder.glob("walk.*.json"):
        path.unlink()
    port = 8000 + os.getpid() % 20000
    server = started(folder, "serve", str(folder / "run" / "best"), "--port", str(port))
    body = json.dumps({"items": [{"prompt": "Why?", "responses": ["Because.", "No."]}]}).encode()
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/rm/score", body, {"Content-Type": "application/json"})
    times: list[tuple[float, float]] = []
    deadline = time.monotonic() + 120
    while len(times) < NUM_REQUESTS:
        try:
            start = time.monotonic()
            with urllib.request.urlopen(asked) as answer:
                answer.read()
            times.append((start, time.monotonic()))
        except OSError as error:  # not yet listening, or loading (503)
            if time.monotonic() > deadline or server.poll() is not None:
                server.kill()
                sys.exit(f"{error}\n{(folder / 'printed').read_text()}")
        time.sleep(0.3)
    server.send_signal(signal.SIGINT)
    server.wait(60)
    for each in walks(folder):
        asked_files = [[file for at, file in each["walk"] if start <= at <= end] for start, end in times[1:]]
        if any("serving/http" in file for files in asked_files for file in files):
            return min(filter(None, asked_files), key=len)
    sys.exit("no request was traced")


if __name__ == "__main__":
    main()
elif os.environ.get("WALK"):
    ROOT = Path(os.environ["WALK_ROOT"])
    install()
