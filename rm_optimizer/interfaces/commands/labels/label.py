"""`rm-opt label`: a local page on which a person answers questions."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

if TYPE_CHECKING:
    from rm_optimizer.data_efficiency.labeling_page import AnswerLog


def label(
    questions: Annotated[Path, Argument(help="File of questions from rm-opt select: CSV, JSONL or JSON.")],
    port: Annotated[int, Option("--port", min=0, max=65535, help="Port of the page; 0 picks a free one.")] = 0,
    seed: Annotated[int, Option("--seed", min=0, help="Seed of the sides on which responses are shown.")] = 0,
) -> None:
    """Ask the questions on a local page. Keys: A, B, T for a tie, S to skip, U to undo.

    Every answer is saved at once, in NAME.labels.jsonl beside the questions. Repeat a stopped command to continue it.
    """
    from rm_optimizer.data_efficiency.labeling_page import PageServer, open_answer_log
    from rm_optimizer.data_efficiency.questions import read_questions

    read = read_questions(questions)
    found = {item.pair_id: item for item, _ in read}
    answered = {item.pair_id for item, chances in read if any(chance is not None for chance in chances)}
    with (
        open_answer_log(questions, [*found.values()], answered=answered, seed=seed) as log,
        PageServer(log, questions.name, port) as server,
    ):
        print(f"{log.num_questions - log.num_answered:,} of {log.num_questions:,} questions are open")
        print(f"open {server.url}\nCtrl-C stops; the same command goes on", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
        _print_end(log, questions)


def _print_end(log: AnswerLog, questions: Path) -> None:
    print(f"{log.num_answered:,} of {log.num_questions:,} questions are answered")
    if (share := log.first_share) is not None:
        print(f"the response shown first was preferred in {share} of the answers; half means no habit of a side")
    print(f"rm-opt label-import {questions} --out FILE reads the answers")
