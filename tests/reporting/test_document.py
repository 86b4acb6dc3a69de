"""The page of a study: its files, escapes, Markdown, and what a browser makes of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rm_optimizer.reporting.document import Answer, Document, Drawing, Listing, Part
from rm_optimizer.reporting.figures import draw_legend, new_figure
from rm_optimizer.reporting.tables import TextTable
from tests.browser import NEEDS_AXE, NEEDS_BROWSER, assert_accessible, assert_sound


def drawing(number: int) -> Drawing:
    figure, (axes,) = new_figure("Accuracy by labels", "three rounds")
    axes.curve([64, 128, 256], [0.5, 0.6, 0.65], "random")
    axes.set(xlabel="labels", ylabel="accuracy")
    draw_legend(axes)
    return Drawing(f"curves_{number}", figure, "Accuracy by labels")


def document(num_pools: int) -> Document:
    """A page with a part for each pool, of which the first has a name that HTML and Markdown must escape."""
    rows = (("d_optimal", "40% [30%, 50%]"), ("random", "2%"))
    parts = [
        Part(
            f"Pool {name}",
            (
                "",
                drawing(number),
                Listing(f"rules_{number}", TextTable("Saved labels", ("rule", "saving"), rows)),
                ("one: failed, no memory", "two: failed, no disk"),
            ),
        )
        for number, name in enumerate(["a<b>", "c"][:num_pools])
    ]
    return Document("Saved labels", Answer("good", "Choosing saves", ("in 'a<b>' it saves 40%",)), parts)


def written(folder: Path, num_pools: int = 2) -> Path:
    return document(num_pools).write(folder)


def test_a_page_has_its_figures_and_tables_beside_it_and_the_same_bytes_again(tmp_path: Path):
    page = written(tmp_path / "one")
    text = page.read_text()
    assert "Choosing saves" in text
    assert "In &#x27;a&lt;b&gt;&#x27; it saves 40%." in text
    assert {each.name for each in page.parent.iterdir()} == {
        "index.html",
        *(f"curves_{number}.{kind}" for number in (0, 1) for kind in ("png", "svg", "csv")),
        *("rules_0.csv", "rules_1.csv"),
    }
    assert written(tmp_path / "two").read_bytes() == page.read_bytes()


@pytest.mark.parametrize("with_figures", [False, True])
def test_markdown_has_tables_and_names_figures_if_asked(with_figures: bool):
    text = document(2).markdown(with_figures=with_figures)
    assert "| d_optimal | 40% [30%, 50%] |" in text
    assert "## Pool a&lt;b>" in text
    assert "- one: failed, no memory" in text
    assert ("![Accuracy by labels](curves_1.png)" in text) == with_figures


def test_files_of_an_earlier_page_go_and_others_stay(tmp_path: Path):
    written(tmp_path)
    (tmp_path / "notes.csv").write_text("mine")
    assert (tmp_path / "curves_1.svg").is_file()
    names = {path.name for path in written(tmp_path, 1).parent.iterdir()}
    assert names == {"index.html", "notes.csv", "rules_0.csv", *(f"curves_0.{kind}" for kind in ("csv", "png", "svg"))}


@NEEDS_BROWSER
def test_the_page_fits_each_screen_and_loads_nothing(tmp_path: Path):
    assert_sound(written(tmp_path))


@NEEDS_AXE
def test_the_page_is_accessible(tmp_path: Path):
    assert_accessible(written(tmp_path))
