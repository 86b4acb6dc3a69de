"""Registry of the entries of one kind, to which plug-ins add their own. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TypeVar

from rm_optimizer.errors import ConfigError, did_you_mean, nearest

EntryT = TypeVar("EntryT")


class UnknownName(ConfigError, KeyError):
    """A registry has no entry of this name; the text names the nearest one."""

    __str__ = Exception.__str__  # KeyError would put the sentence in quotes


class Registry(Mapping[str, EntryT]):
    """Entries of one kind by name.

    An unknown name first loads the installed plug-ins, which are entry points of the group `rm_optimizer.KIND`. Each is
    a module or an object whose import adds an entry.

    Args:
        kind: kind of the entries, such as `optimizer`; error messages and the group of entry points have it.
        entries: entries that the package brings.

    Example:
        >>> shapes = Registry("shape", {"circle": 0})
        >>> shapes.add("square", 4)
        >>> shapes["square"], list(shapes)
        (4, ['circle', 'square'])
    """

    def __init__(self, kind: str, entries: Mapping[str, EntryT] | None = None) -> None:
        self.kind, self._entries, self._origins = kind, dict(entries or {}), dict[str, str]()

    def add(self, name: str, entry: EntryT, made_by: object = None) -> None:
        """Add an entry under a new name.

        Args:
            name: name of the entry, as the user types it.
            entry: the entry.
            made_by: function or class of the entry. If a notebook defines it again, the new entry replaces the old one.

        Raises:
            ConfigError: if the name is not an identifier or is taken.
        """
        origin = f"{getattr(made_by, '__module__', '')}.{getattr(made_by, '__qualname__', '')}"
        if not name.isidentifier():
            raise ConfigError(f"the name of a new {self.kind} must be letters, digits and underscores, got '{name}'")
        if name in self._entries and (made_by is None or self._origins.get(name) != origin):
            raise ConfigError(f"the {self.kind} '{name}' is registered already; choose another name")
        self._entries[name], self._origins[name] = entry, origin

    def __getitem__(self, name: str) -> EntryT:
        if name not in self._entries:
            load_entry_points(self.kind)
        if name not in self._entries:
            hint = "" if nearest(name, self._entries, 0.5) else "; import its module, or name it in plugins=[MODULE]"
            raise UnknownName(did_you_mean(self.kind, name, self._entries) + hint)
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@cache
def load_entry_points(kind: str) -> None:
    """Load the installed plug-ins of a kind, once in a process; their import registers the entries."""
    for plugin in entry_points(group=f"rm_optimizer.{kind.replace(' ', '_')}"):
        plugin.load()


def import_plugins(modules: Iterable[str], option: str = "plugins") -> None:
    """Import the modules that `plugins=[…]` names, each of which may register entries.

    Args:
        modules: names of the modules.
        option: option that names them.

    Raises:
        ConfigError: if a module cannot be found.
    """
    for name in modules:
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            raise ConfigError(
                f"{option} must name modules that Python can import, got '{name}'; install it, or add its folder to "
                "PYTHONPATH"
            ) from error
