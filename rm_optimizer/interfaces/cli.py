"""`rm-opt`: the commands and their options. What a command needs is imported when it runs, so help is immediate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rm_optimizer.interfaces.groups import Commands, HydraCommand, RootCommands
from rm_optimizer.schema.data import MAX_BAD_SHARE

if TYPE_CHECKING:
    from rm_optimizer.interfaces.pairs import PairOptions

QUIET = {
    "no_args_is_help": True,
    "rich_markup_mode": None,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(cls=RootCommands, help="Train, measure and use Bradley-Terry reward models.", **QUIET)  # type: ignore[arg-type]
data_app = typer.Typer(cls=Commands, help="Look at preference data.", add_completion=False, **QUIET)  # type: ignore[arg-type]
app.add_typer(data_app, name="data")

TokenBudget = Annotated[int, typer.Option("--token-budget", min=1, help="Tokens of one pass, padding included.")]
MaxLength = Annotated[int | None, typer.Option("--max-length", min=8, help="Tokens kept of a sequence.")]
Checkpoint = Annotated[str, typer.Argument(help="Hub id, exported folder, run folder or Lightning .ckpt.")]
InputForm = Annotated[
    str | None,
    typer.Option("--input-form", help="Input of a model of others without a chat template: plain or pair."),
]


def _pair_options(
    data_format: Annotated[
        str, typer.Option("--format", help="Row format: auto, explicit, hh, messages, lists, winner or kwise.")
    ] = "auto",
    columns: Annotated[
        list[str], typer.Option("--columns", metavar="OURS=THEIRS", help="Map columns; may be repeated.")
    ] = [],  # noqa: B006
    on_bad_row: Annotated[str, typer.Option("--on-bad-row", help="What a bad row does: error or drop.")] = "error",
    winner: Annotated[
        str | None,
        typer.Option("--winner", metavar="FIRST,SECOND,TIE", help="Values of the winner column; | between equal ones."),
    ] = None,
    max_bad_share: Annotated[
        float, typer.Option("--max-bad-share", min=0, max=1, help="Most bad rows to drop, as a share of a file's rows.")
    ] = MAX_BAD_SHARE,
    kwise_rule: Annotated[
        str, typer.Option("--kwise-rule", help="Pairs of a list of responses: all, best_worst or adjacent.")
    ] = "all",
    label: Annotated[
        float, typer.Option("--label", min=0, max=1, help="P(chosen > rejected) of rows without a label; 0.5 for ties.")
    ] = 1.0,
) -> PairOptions:
    """The flags of every command that reads pairs."""
    from rm_optimizer.interfaces.pairs import PairOptions

    return PairOptions(data_format, tuple(columns), on_bad_row, winner, max_bad_share, kwise_rule, label)


def reads_pairs(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the flags of `_pair_options` in place of its parameter `pair_options`."""
    flags, own = (
        inspect.signature(function, locals={"PairOptions": object}, eval_str=True)
        for function in (_pair_options, command)
    )

    @wraps(command)
    def run(**options: Any) -> None:
        pair_options = _pair_options(**{name: options.pop(name) for name in flags.parameters})
        command(pair_options=pair_options, **options)

    parameters = [item for item in own.parameters.values() if item.name != "pair_options"] + list(
        flags.parameters.values()
    )
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {item.name: item.annotation for item in parameters}
    return run


def _print_version(wanted: bool) -> None:
    if wanted:
        from rm_optimizer import __version__

        print(f"rm-opt {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train, measure and use Bradley-Terry reward models."""


@app.command(cls=HydraCommand, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def train(
    ctx: typer.Context,
    model: Annotated[str | None, typer.Option("--model", "-m", help="Model preset, or the path of a model.")] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", "-o", help="Optimizer preset.")] = None,
    data: Annotated[str | None, typer.Option("--data", "-d", help="File, folder or hub name of pairs.")] = None,
    epochs: Annotated[str | None, typer.Option("--epochs", "-e", help="Passes over the pairs.")] = None,
    batch_size: Annotated[str | None, typer.Option("--batch-size", "-b", help="Pairs of an optimizer step.")] = None,
) -> None:
    """Train a reward model. Options are written name=value: `rm-opt train optimizer=adamw optimizer.lr=1e-5`.

    The flags below are short for the commonest ones. Everything else is passed on as it stands, Hydra's own flags
    included: `--cfg job` prints the composed options, `--multirun` runs a sweep, `--config-dir DIR` adds presets.
    """
    from rm_optimizer.interfaces.launch import become, train_overrides

    overrides = train_overrides(model=model, optimizer=optimizer, data=data, epochs=epochs, batch_size=batch_size)
    become("rm_optimizer.train", [*overrides, *ctx.args])


@app.command()
@reads_pairs
def evaluate(
    checkpoint: Checkpoint,
    data: Annotated[list[str], typer.Option("--data", "-d", help="Pairs: file, folder, pattern; may be repeated.")],
    pair_options: PairOptions,
    output: Annotated[Path | None, typer.Option("--output", help="Folder for JSON and plots.")] = None,
    by: Annotated[
        list[str], typer.Option("--by", metavar="COLUMN", help="Also report by this column; may be repeated.")
    ] = [],  # noqa: B006
    max_length: MaxLength = None,
    token_budget: TokenBudget = 16384,
    bootstrap: Annotated[int, typer.Option("--bootstrap", min=0, help="Resamples for the intervals.")] = 1000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the resamples.")] = 0,
    input_form: InputForm = None,
) -> None:
    """Measure a reward model on preference pairs: table, JSON and plots; a stopped run continues when repeated."""
    from rm_optimizer.interfaces.commands.evaluate import evaluate_and_print

    evaluate_and_print(
        checkpoint,
        data,
        pair_options,
        by=by,
        output_dir=output,
        max_length=max_length,
        token_budget=token_budget,
        num_bootstrap=bootstrap,
        seed=seed,
        input_form=input_form,
    )


@app.command()
def score(
    checkpoint: Checkpoint,
    in_file: Annotated[Path | None, typer.Argument(help="JSONL (also .gz), CSV or Parquet to score.")] = None,
    out_file: Annotated[Path | None, typer.Argument(help="Where to write it with a `reward` column.")] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Score this prompt…")] = None,
    response: Annotated[list[str], typer.Option("--response", help="…and response; may be repeated.")] = [],  # noqa: B006
    token_budget: TokenBudget = 16384,
    max_length: MaxLength = None,
    input_form: InputForm = None,
) -> None:
    """Print the reward of responses, or add a `reward` column to a file; a stopped file run continues when repeated."""
    from rm_optimizer.interfaces.commands.score import print_scores, score_to_file

    options: dict[str, Any] = {"token_budget": token_budget, "max_length": max_length, "input_form": input_form}
    if prompt is not None:
        print_scores(checkpoint, prompt, response, (in_file, out_file), **options)
    else:
        score_to_file(checkpoint, in_file, out_file, response, **options)


@app.command()
def serve(
    checkpoint: Checkpoint,
    engine: Annotated[str, typer.Option("--engine", help="auto, transformers or vllm.")] = "auto",
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port to listen on.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="RM_OPT_API_KEY", help="Key every request must bring.")
    ] = None,
    update_key: Annotated[
        str | None,
        typer.Option("--update-key", envvar="RM_OPT_UPDATE_KEY", help="Key of weight updates instead of --api-key."),
    ] = None,
    no_updates: Annotated[bool, typer.Option("--no-updates", help="Let nobody replace the weights.")] = False,
    transports: Annotated[
        str, typer.Option("--transports", help="Of weight updates: inline, path, gloo, nccl.")
    ] = "inline,path",
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    token_budget: Annotated[
        int | None, typer.Option("--token-budget", min=1, help="Tokens of one pass; measured if absent.")
    ] = None,
    max_queued_tokens: Annotated[
        int, typer.Option("--max-queued-tokens", min=1, help="Most tokens of unanswered requests.")
    ] = 131_072,
    weights_root: Annotated[
        Path | None, typer.Option("--weights-root", help="Folder below which weight updates may name files.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option("--served-model-name", help="What requests call the model.")
    ] = None,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads of the model.")] = None,
) -> None:
    """Serve a reward model over HTTP until SIGTERM; rewards are raw unless a request asks for their sigmoid."""
    from rm_optimizer.interfaces.commands.serve import serve as run_server
    from rm_optimizer.interfaces.commands.serve_options import ServeOptions

    run_server(
        ServeOptions(
            checkpoint,
            engine=engine,
            host=host,
            port=port,
            api_key=api_key,
            update_key=update_key,
            takes_updates=not no_updates,
            transports=transports,
            dtype=dtype,
            token_budget=token_budget,
            max_queued_tokens=max_queued_tokens,
            weights_root=weights_root,
            served_model_name=served_model_name,
            threads=threads,
        )
    )


@data_app.command("check")
@reads_pairs
def data_check(
    paths: Annotated[list[str], typer.Argument(help="Files, folders or hub names; each is one split.")],
    pair_options: PairOptions,
    tokenizer: Annotated[str | None, typer.Option("--tokenizer", help="Hub id or folder of a tokenizer.")] = None,
    max_length: Annotated[int, typer.Option("--max-length", min=8, help="Tokens kept of a sequence.")] = 512,
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the audit here.")] = None,
) -> None:
    """Audit preference data: rows, duplicates, contradictions, lengths, overlap of splits, the length baseline."""
    from rm_optimizer.interfaces.commands.data_check import audit_and_print

    audit_and_print(paths, pair_options, tokenizer=tokenizer, max_length=max_length, json_file=json_file)


@app.command()
@reads_pairs
def doctor(
    checkpoint: Checkpoint,
    pair_options: PairOptions,
    data: Annotated[list[str], typer.Option("--data", "-d", help="Pairs, each one split; may be repeated.")] = [],  # noqa: B006
    json_file: Annotated[Path | None, typer.Option("--json", help="Also write the diagnosis here.")] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Also print the checks that are ok.")] = False,
    max_length: MaxLength = None,
    max_pairs: Annotated[int, typer.Option("--max-pairs", min=1, help="Pairs, over all splits, to score.")] = 256,
    token_budget: TokenBudget = 8192,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of samples and random labels.")] = 0,
    input_form: InputForm = None,
) -> None:
    """Check what breaks reward models, in a model and its pairs; exits with 4 if a check fails, 0 on warnings."""
    from rm_optimizer.interfaces.commands.doctor import diagnose_and_print

    code = diagnose_and_print(
        checkpoint,
        data,
        pair_options,
        json_file=json_file,
        max_length=max_length,
        max_pairs=max_pairs,
        token_budget=token_budget,
        seed=seed,
        show_all=show_all,
        input_form=input_form,
    )
    raise typer.Exit(code)


@app.command(cls=HydraCommand, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def analyze(
    ctx: typer.Context,
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", "-c", help="Run folder, model or .ckpt.")] = None,
    kind: Annotated[str | None, typer.Option("--type", "-t", help="What to measure; a landscape preset.")] = None,
    data: Annotated[str | None, typer.Option("--data", "-d", help="Pairs; a run's own unless given.")] = None,
    top_k: Annotated[str | None, typer.Option("--top-k", "-k", help="Eigenvalues to compute.")] = None,
    method: Annotated[str | None, typer.Option("--method", help="How to compute them.")] = None,
    pairs: Annotated[str | None, typer.Option("--pairs", help="Pairs that the loss is averaged over.")] = None,
    params: Annotated[str | None, typer.Option("--params", help="trainable, head, lora or a pattern of names.")] = None,
) -> None:
    """Measure the loss landscape of a model: `rm-opt analyze --checkpoint RUN --type hessian`.

    Types: hessian, gauss_newton, density, slices, surface, layers, trajectory. The flags are short for the commonest
    options; everything else is passed on as it stands: `landscape.num_points=41`, `--cfg job` to see all of them.
    """
    from rm_optimizer.interfaces.launch import analyze_overrides, become

    overrides = analyze_overrides(
        checkpoint=checkpoint, kind=kind, data=data, top_k=top_k, method=method, pairs=pairs, params=params
    )
    become("rm_optimizer.analyze", [*overrides, *ctx.args])


@app.command()
def info() -> None:
    """Print versions, devices, where the presets are, and what presets and optimizers there are."""
    from rm_optimizer.interfaces.commands.info import print_info

    print_info()


@app.command()
def params(
    model: Annotated[str, typer.Argument(help="Model preset, folder or hub id.")],
    optimizer: Annotated[str, typer.Option("--optimizer", "-o", help="Optimizer preset.")] = "adamw",
) -> None:
    """Print which parameters an optimizer treats how."""
    from rm_optimizer.interfaces.commands.params import print_params

    print_params(model, optimizer)


if __name__ == "__main__":
    app()
