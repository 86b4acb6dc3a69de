"""A stored model gives the rewards of its files, or a word about what is otherwise."""

from __future__ import annotations

import pytest

from tests.core.storage.folder_forms import FORMS, outcome


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_folder_gives_the_rewards_of_its_files_or_is_refused(tmp_path, form):
    told = outcome(form, tmp_path)
    assert not told.startswith("wrong")
    assert form.has_same_rewards or told != "right"
