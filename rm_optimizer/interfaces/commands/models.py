"""`rm-opt import`, `export` and `why`: reward models of other software, and differences of their scores."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from rm_optimizer.interfaces import inputs
from rm_optimizer.interfaces.inputs import PairOptions
from rm_optimizer.interfaces.outputs import printed_beside, write_json
from rm_optimizer.schema.data import Spelling

DTYPE = "Type of the weights: float32, bfloat16 or float16."


def import_model(
    source: Annotated[str, Argument(help="Folder or hub id of the model, in the form of another project.")],
    out: Annotated[Path, Argument(help="Folder to write.")],
    base: Annotated[str | None, Option(help="Folder or hub id of configuration and tokenizer.")] = None,
    head: Annotated[str | None, Option(metavar="NAME", help="Head to read, where several are stored.")] = None,
    logit: Annotated[str | None, Option(help="Reward of two labels: difference (second less first), 0 or 1.")] = None,
    activation: Annotated[str | None, Option(help="Function between a head's layers: relu, gelu, silu, tanh.")] = None,
    marker: Annotated[str | None, Option(metavar="TEXT", help="Text that opens the answer, for a gated head.")] = None,
    drop_constant: Annotated[
        bool, Option("--drop-constant", help="Leave the head's constant out, so that vLLM can serve the folder.")
    ] = False,
    template: Annotated[
        Path | None, Option(metavar="FILE", help="Chat template that the model was trained with.")
    ] = None,
    append: Annotated[
        str | None, Option(metavar="TEXT", help="Text after each conversation; default: the form's own.")
    ] = None,
    input_form: Annotated[
        str | None, Option(help="Input form of a model without a chat template: plain or pair.")
    ] = None,
    max_length: Annotated[int | None, Option(min=8, help="Longest sequence in tokens; the rest is cut.")] = None,
    dtype: Annotated[str | None, Option(help=DTYPE)] = None,
    revision: Annotated[str | None, Option(help="Hub revision of the source.")] = None,
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Run the code of the source's tokenizer, once.")
    ] = False,
) -> None:
    """Import a reward model of another project.

    It becomes a certified folder with the same rewards. Value heads of TRL, LLaMA-Factory and OpenRLHF,
    DeepSpeed-Chat, Starling, UltraRM, Beaver, InternLM2, heads of several layers and ArmoRM are recognized by
    their tensors.
    """
    options: dict[str, Any] = dict(locals())  # each parameter is an option of the function of the same name
    from rm_optimizer.core.importing.importing import import_reward_model

    imported = import_reward_model(options.pop("source"), options.pop("out"), **options)
    print("\n".join(imported.sentences()))


def export_model(
    checkpoint: Annotated[str, Argument(help="Hub id, exported folder, run folder or Lightning .ckpt.")],
    out: Annotated[Path, Argument(help="Folder to write.")],
    pair_options: PairOptions,
    sources: Annotated[
        list[str], Option("--data", "-d", help="Pairs to compare on, and to normalize on; may be repeated.")
    ] = [],  # noqa: B006
    dtype: Annotated[str | None, Option(help=DTYPE)] = None,
    adapter: Annotated[bool, Option("--adapter", help="Write the LoRA factors and the head alone.")] = False,
    normalize: Annotated[bool, Option("--normalize", help="Give the rewards of --data mean 0, deviation 1.")] = False,
    project: Annotated[str | None, Option("--for", help="Project: trl, openrlhf, llama-factory, vllm or tei.")] = None,
    push: Annotated[str | None, Option(metavar="REPO", help="Also upload it to this hub repository.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Also write the result to this JSON file.")] = None,
) -> None:
    """Export a reward model in another type or scale.

    The folder is certified; adapters are merged.
    """
    from rm_optimizer.core.importing.exporting import export_reward_model

    pairs = [*pair_options.load(sources)] if sources else []
    options: dict[str, Any] = {"dtype": dtype, "normalize": normalize, "project": project, "push": push}
    made = export_reward_model(checkpoint, out, adapter_only=adapter, pairs=pairs, **options)
    with printed_beside(json_file):
        print(f"exported: {made.folder}", *(f"{name}: {value}" for name, value in made.facts()), sep="\n")
    write_json(json_file, made.to_json())


SIDE = (
    "Model folder, hub id or adapter folder; server: http://HOST:PORT for rm-opt serve, with /classify for vLLM, "
    "/get_reward for OpenRLHF or /predict for text-embeddings-inference; or a file with columns prompt, response and "
    "reward."
)


def why(
    a: Annotated[str, Argument(help=SIDE, metavar="A")],
    b: Annotated[str, Argument(help="The other side, in the same forms; one of the two must be a model.", metavar="B")],
    text: Annotated[Path | None, Option("--text", help="File of further prompts and responses to compare on.")] = None,
    layout: Annotated[str | None, Option(metavar="MAPPING", help="Layout of the files, as for rm-opt score.")] = None,
    json_file: Annotated[Path | None, Option("--json", help="Also write all that was tried to this JSON file.")] = None,
    max_length: Annotated[
        int | None, Option("--max-length", min=8, help="Longest sequence in tokens of the models that are loaded.")
    ] = None,
) -> None:
    """Explain why two scorings of the same conversations differ.

    Prints the cause, the evidence and the remedy. Exits with 0 if the rewards agree, and with 4 if they differ.
    """
    from rm_optimizer.explanation.explain import explain_difference

    with Spelling.flags.used():
        found = explain_difference(a, b, texts=text, layout=inputs.spelled(layout), max_length=max_length)
    with printed_beside(json_file):
        print(found)
    write_json(json_file, found.to_json())
    raise Exit(found.exit_code)
