"""A worker process without a model, which comes up and then stands still in one way or another."""

from __future__ import annotations

import threading
import time
from multiprocessing.connection import Connection


def run(connection: Connection, behavior: str) -> None:
    """`silent` sends nothing, `hung` sends signs of life and no answer, `dumb` does not even come up."""
    if behavior == "dumb":
        time.sleep(600)
    connection.send(("up", None))
    if behavior == "hung":
        threading.Thread(target=show_life, args=(connection,), daemon=True).start()
    while behavior != "silent":
        connection.recv()
    time.sleep(600)


def show_life(connection: Connection) -> None:
    while True:
        connection.send(("alive",))
        time.sleep(0.05)
