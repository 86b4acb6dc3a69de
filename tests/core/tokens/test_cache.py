"""The tokenized cache: what was given comes back, whoever builds it and whatever befell it before."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import normalizers

from rm_optimizer.core.pairs.pair import Message, PreferencePair
from rm_optimizer.core.tokens import cache as tokens
from rm_optimizer.core.tokens.cache import TokenizedPairs, TruncationReport, default_cache_dir, tokenize_pairs
from rm_optimizer.core.tokens.chat import ConversationRenderer
from rm_optimizer.errors import DataError
from tests.builders import byte_tokenizer

FILES = ["meta.json", "num_cut.bin", "offsets.bin", "pair_index.bin", "tokens.bin"]


def renderer(max_length: int = 60) -> ConversationRenderer:
    return ConversationRenderer(byte_tokenizer(), max_length)


def some_pairs(count: int) -> list[PreferencePair]:
    pairs = [
        PreferencePair(f"question {i} " * (1 + i % 5), f"good {i}", f"bad {'so ' * (i % 3)}{i}") for i in range(count)
    ]
    return [*pairs, PreferencePair((Message("system", "s"), Message("user", "u")), "yes", "no")]


def test_tokens_are_the_renderers_for_every_pair_across_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokens, "_CHUNK", 7)
    pairs, render = some_pairs(40), renderer()
    tokenized = tokenize_pairs(pairs, render, tmp_path)
    assert len(tokenized) == 41
    assert tokenized.lengths.shape == tokenized.num_cut.shape == (41, 2)
    for i, pair in enumerate(pairs):
        for column, (ids, response) in enumerate(
            [(tokenized.chosen(i), pair.chosen), (tokenized.rejected(i), pair.rejected)]
        ):
            expected = render.encode(pair.prompt, response)
            assert tuple(ids.tolist()) == expected.ids
            assert ids.dtype == np.int32
            assert tokenized.lengths[i, column] == len(ids)
            assert tokenized.num_cut[i, column] == expected.prompt_cut + expected.response_cut
    assert tokenized.num_cut.any()


def test_pairs_identical_after_cutting_are_dropped_and_counted(tmp_path: Path):
    long = "same " * 30
    pairs = [PreferencePair("p", "a", "b"), PreferencePair("p", long + "x", long + "y"), PreferencePair("p", "c", "d")]
    tokenized = tokenize_pairs(pairs, renderer(), tmp_path)
    assert tokenized.pair_index.tolist() == [0, 2]
    assert tokenized.report.num_identical_dropped == 1
    assert tokenized.num_cut.any(axis=1).tolist() == [False, True, False]
    assert tuple(tokenized.chosen(1).tolist()) == renderer().encode("p", "c").ids


def test_the_truncation_report_counts_every_pair_given(tmp_path: Path):
    long = "same " * 30
    pairs = [PreferencePair("p", "a", "b"), PreferencePair("p", long + "x", long + "y"), PreferencePair(long, "c", "d")]
    report = tokenize_pairs(pairs, renderer(), tmp_path).report
    frame = len("Prompt: \n\nResponse: </s>") - 3
    lengths = np.array([frame + 2, frame + 2, frame + 152, frame + 152, frame + 151, frame + 151])
    assert (report.max_length, report.num_pairs, report.num_identical_dropped) == (60, 3, 1)
    assert report.num_response_cut == 1
    assert report.num_prompt_cut == 2
    assert report.length_quantiles["1"] == lengths.max()
    assert report.length_quantiles["0.5"] == np.median(lengths)
    assert report.tokens_cut_share == pytest.approx(np.maximum(lengths - 60, 0).sum() / lengths.sum())
    assert TruncationReport.from_json(report.to_json()) == report


def test_a_second_run_opens_the_cache_and_tokenizes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = tokenize_pairs(some_pairs(9), renderer(), tmp_path)
    monkeypatch.setattr(tokens, "_build", None)
    second = tokenize_pairs(some_pairs(9), renderer(), tmp_path)
    assert second.folder == first.folder
    assert sorted(file.name for file in first.folder.iterdir()) == FILES
    assert second.report == first.report


def shout(messages: tuple[Message, ...], response: str) -> str:
    return f"{messages[-1].content} >> {response.upper()}"


def shout_but_for_long_responses(messages: tuple[Message, ...], response: str) -> str:
    return shout(messages, response) if len(response) < 20 else f"{messages[-1].content} >> {response}"


def test_whatever_the_tokens_depend_on_gives_a_cache_of_its_own(tmp_path: Path):
    pairs = [PreferencePair("p", "a", "a response of some length")]
    lowered = byte_tokenizer()
    lowered.backend_tokenizer.normalizer = normalizers.Replace("length", "L")
    template = (
        "{% for message in messages %}{% if message['content'] | length > 40 %}!{% endif %}{{ message['content'] }}"
    )
    chats = [byte_tokenizer(template + "{% endfor %}"), byte_tokenizer(template.replace("40", "41") + "{% endfor %}")]
    renderers = [renderer(), renderer(61), ConversationRenderer(lowered, 60)]
    renderers += [ConversationRenderer(byte_tokenizer(), 60, fn) for fn in (shout, shout_but_for_long_responses)]
    renderers += [ConversationRenderer(tokenizer, 60) for tokenizer in chats]
    assert renderers[3].template_hash == renderers[4].template_hash
    assert renderers[5].template_hash == renderers[6].template_hash
    folders = {tokenize_pairs(pairs, render, tmp_path).folder for render in renderers}
    assert len(folders) == len(renderers)
    others = [[PreferencePair("q", "a", "b")], [PreferencePair("p", "a", "b")], pairs * 2, []]
    folders |= {tokenize_pairs(other, renderer(), tmp_path).folder for other in others}
    assert len(folders) == len(renderers) + len(others)


def test_margins_labels_and_padding_state_do_not_tokenize_anew(tmp_path: Path):
    first = tokenize_pairs([PreferencePair("p", "a", "b")], renderer(), tmp_path)
    render = renderer()
    render.tokenizer(["x", "longer"], padding=True, truncation=True, max_length=3)
    second = tokenize_pairs([PreferencePair("p", "a", "b", margin=2.0, label=0.5)], render, tmp_path)
    assert second.folder == first.folder


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["gone", "short", "altered", "empty"])
def test_a_torn_or_altered_cache_is_built_anew(tmp_path: Path, name: str, damage: str):
    first = tokenize_pairs(some_pairs(5), renderer(), tmp_path)
    expected = [first.chosen(i).tolist() for i in range(len(first))]
    file = first.folder / name
    content = file.read_bytes()
    file.unlink()
    if damage != "gone":
        changed = bytes([content[0] ^ 1]) + content[1:]
        file.write_bytes({"short": content[:-3], "altered": changed, "empty": b""}[damage])
    again = tokenize_pairs(some_pairs(5), renderer(), tmp_path)
    assert [again.chosen(i).tolist() for i in range(len(again))] == expected
    assert (again.folder / name).read_bytes() == content
    assert [folder.name for folder in tmp_path.iterdir()] == [first.folder.name]


def test_a_failed_build_leaves_nothing(tmp_path: Path):
    template = (
        "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
        "{{ m['content'] }}{% endfor %}"
    )
    render = ConversationRenderer(byte_tokenizer(template), 60)
    with pytest.raises(DataError, match="no tools"):
        tokenize_pairs([PreferencePair((Message("tool", "t"),), "a", "b")], render, tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_killed_builds_left_behind_goes_after_a_day(tmp_path: Path):
    old, fresh = tmp_path / ".building-old", tmp_path / ".building-fresh"
    for folder in (old, fresh):
        folder.mkdir()
        (folder / "tokens.bin").write_bytes(b"half")
    os.utime(old, (time.time() - 90_000,) * 2)
    tokenize_pairs(some_pairs(1), renderer(), tmp_path)
    assert not old.exists()
    assert fresh.exists()


RACER = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.core.tokens.test_cache import renderer, some_pairs
from rm_optimizer.core.tokens.cache import tokenize_pairs
parent, pairs, render = Path(sys.argv[1]), some_pairs(1000), renderer()
(parent / f"ready-{sys.argv[3]}").touch()
while not (parent / "go").exists():
    time.sleep(0.001)
for name in ("new", "torn"):
    tokenized = tokenize_pairs(pairs, render, parent / name)
    print(len(tokenized), sum(int(tokenized.chosen(i).sum()) for i in range(len(tokenized))))
"""


def test_processes_that_start_together_leave_one_cache_and_agree(python: Path, tmp_path: Path):
    alone = tokenize_pairs(some_pairs(1000), renderer(), tmp_path / "alone")
    torn = tmp_path / "torn" / alone.folder.name
    torn.mkdir(parents=True)
    (torn / "tokens.bin").write_bytes(b"half")
    here = str(Path(__file__).parents[3])
    racers = [
        subprocess.Popen([python, "-c", RACER, str(tmp_path), here, str(i)], stdout=subprocess.PIPE, text=True)
        for i in range(2)
    ]
    while all(racer.poll() is None for racer in racers) and len(list(tmp_path.glob("ready-*"))) < 2:
        time.sleep(0.01)
    (tmp_path / "go").touch()
    answers = {racer.communicate(timeout=120)[0] for racer in racers}
    total = sum(int(alone.chosen(i).sum()) for i in range(len(alone)))
    assert answers == {2 * f"{len(alone)} {total}\n"}
    for name in ("new", "torn"):
        assert [folder.name for folder in (tmp_path / name).iterdir()] == [alone.folder.name]


def test_the_loser_of_a_race_uses_the_winners_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build = tokens._build
    winners: list[TokenizedPairs] = []

    def build_while_another_run_finishes(*args: object) -> None:
        build(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(tokens, "_build", build)
        winners.append(tokenize_pairs(some_pairs(5), renderer(), tmp_path))

    monkeypatch.setattr(tokens, "_build", build_while_another_run_finishes)
    loser = tokenize_pairs(some_pairs(5), renderer(), tmp_path)
    assert loser.folder == winners[0].folder
    assert [folder.name for folder in tmp_path.iterdir()] == [loser.folder.name]


def test_pickling_sends_the_folder_and_not_the_tokens(tmp_path: Path):
    tokenized = tokenize_pairs(some_pairs(300), renderer(), tmp_path)
    sent = pickle.dumps(tokenized)
    assert len(sent) < 1000
    assert pickle.loads(sent).chosen(7).tolist() == tokenized.chosen(7).tolist()


def test_no_pairs_give_no_tokens(tmp_path: Path):
    tokenized = tokenize_pairs([], renderer(), tmp_path)
    assert len(tokenized) == 0
    assert tokenized.lengths.shape == (0, 2)


def test_a_folder_that_cannot_be_written_gives_one_warning_and_the_same_tokens(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(UserWarning, match=r"cannot be kept in .*set data.cache_dir") as caught:
        tokenized = tokenize_pairs(some_pairs(3), renderer(), tmp_path / "file" / "cache")
    assert len(caught) == 1
    assert tuple(tokenized.chosen(0).tolist()) == renderer().encode(some_pairs(1)[0].prompt, "good 0").ids


def test_an_intact_cache_is_read_from_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tokenize_pairs(some_pairs(3), renderer(), tmp_path)
    monkeypatch.setattr(tokens, "_writable", None)
    assert len(tokenize_pairs(some_pairs(3), renderer(), tmp_path)) == 4


def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens, "_checksum", full)
    with pytest.raises(DataError, match=r"could not be written to .* \(No space left on device\); free space"):
        tokenize_pairs(some_pairs(3), renderer(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_default_folder_is_the_variables_or_the_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RM_OPT_CACHE", str(tmp_path / "mine"))
    assert default_cache_dir() == tmp_path / "mine"
    assert tokenize_pairs(some_pairs(1), renderer(), None).folder.parent == tmp_path / "mine"
    monkeypatch.delenv("RM_OPT_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "rm_optimizer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "rm_optimizer"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert default_cache_dir() == tmp_path / "Library" / "Caches" / "rm_optimizer"


def test_progress_is_shown_for_large_sets_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    tokenize_pairs(some_pairs(5), renderer(), tmp_path)
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(tokens, "_PROGRESS_FROM", 5)
    monkeypatch.setenv("FORCE_COLOR", "1")
    tokenize_pairs(some_pairs(6), renderer(), tmp_path)
    assert "Tokenizing" in capfd.readouterr().err


def test_the_cache_holds_no_text(tmp_path: Path):
    folder = tokenize_pairs(some_pairs(3), renderer(), tmp_path).folder
    meta = json.loads((folder / "meta.json").read_text())
    assert set(meta) == {"report", "checksums"}
