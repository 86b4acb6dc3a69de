"""One registry class for all kinds: names are unique, unknown ones are explained, plug-ins load late."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest

from rm_optimizer.errors import ConfigError
from rm_optimizer.schema import registry
from rm_optimizer.schema.registry import Registry, UnknownName, import_plugins


def test_a_lookup_names_the_nearest_entry_and_behaves_as_a_mapping():
    shapes = Registry("shape", {"circle": 0, "square": 4})
    with pytest.raises(UnknownName, match=r"^unknown shape 'sqare'; did you mean 'square'\? Known: circle, square"):
        shapes["sqare"]
    assert "sqare" not in shapes
    assert shapes.get("sqare") is None
    assert dict(shapes) == {"circle": 0, "square": 4}


def test_a_name_is_given_once_but_a_notebook_cell_may_run_again():
    shapes: Registry[int] = Registry("shape", {"circle": 0})

    def star() -> None: ...

    def other() -> None: ...

    shapes.add("star", 5, star)
    shapes.add("star", 6, star)
    assert shapes["star"] == 6
    for name, made_by in (("circle", star), ("star", other), ("star", None)):
        with pytest.raises(ConfigError, match=f"the shape '{name}' is registered already; choose another name"):
            shapes.add(name, 7, made_by)
    with pytest.raises(ConfigError, match="must be letters, digits and underscores, got 'two words'"):
        shapes.add("two words", 7)


def test_an_unknown_name_loads_entry_points_once(monkeypatch):
    shapes: Registry[int] = Registry("odd shape", {"circle": 0})
    loaded = []

    class Plugin:
        def load(self):
            loaded.append(self)
            shapes.add("star", 5)

    def found(*, group: str) -> list[Plugin]:
        assert group == "rm_optimizer.odd_shape"
        return [Plugin()]

    assert metadata.entry_points(group="rm_optimizer.odd_shape") == ()
    monkeypatch.setattr(registry, "entry_points", found)
    registry.load_entry_points.cache_clear()
    assert shapes["circle"] == 0
    assert loaded == []
    assert shapes["star"] == 5
    with pytest.raises(UnknownName, match="Known: circle, star"):
        shapes["moon"]
    assert len(loaded) == 1


def test_plugins_are_imported_and_a_missing_one_is_named(tmp_path, monkeypatch):
    (tmp_path / "my_shapes.py").write_text("import absent_dependency\n", encoding="utf-8")
    (tmp_path / "my_good_shapes.py").write_text("", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    import_plugins(["my_good_shapes"])
    assert sys.modules.pop("my_good_shapes")
    with pytest.raises(ConfigError, match="got 'my_shape'; install it, or add its folder to PYTHONPATH"):
        import_plugins(["my_shape"])
    with pytest.raises(ModuleNotFoundError, match="absent_dependency"):
        import_plugins(["my_shapes"])
