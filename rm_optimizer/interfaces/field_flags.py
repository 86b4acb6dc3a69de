"""Options of a command that are fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, signature
from typing import Any, get_type_hints

from typer import Context

from rm_optimizer.errors import ConfigError


def with_field_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace each parameter of a command that is a dataclass by one option for each field.

    Args:
        command: function for typer; the fields of its dataclasses are annotated like parameters of such a function.
    """
    own = signature(command, eval_str=True)
    kinds: dict[str, Any] = {
        item.name: item.annotation for item in own.parameters.values() if is_dataclass(item.annotation)
    }
    flags: dict[str, list[Parameter]] = {name: [] for name in kinds}
    for name, kind in kinds.items():
        hints = get_type_hints(kind, include_extras=True)
        for field in fields(kind):
            default = field.default if field.default_factory is MISSING else field.default_factory()
            default = Parameter.empty if default is MISSING else default
            one = Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name])
            flags[name].append(one)

    @wraps(command)
    def run(**options: Any) -> Any:
        built = {
            name: kind(**{flag.name: options.pop(flag.name) for flag in flags[name]}) for name, kind in kinds.items()
        }
        return command(**built, **options)

    parameters = [flag for item in own.parameters.values() for flag in flags.get(item.name, [item])]
    parameters = [item.replace(kind=Parameter.KEYWORD_ONLY) for item in parameters]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def refuse_unread(context: Context, when: str, *names: str) -> None:
    """Refuse options that the user typed and nothing reads.

    Args:
        context: the command line.
        when: condition under which the options are not read, such as `with --completions`.
        names: parameters of the command.

    Raises:
        ConfigError: naming the first such option.
    """
    flags = {item.name: item.opts[0] for item in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise ConfigError(f"{flags[name]} has no effect {when}; leave it out")
