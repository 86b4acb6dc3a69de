"""`rm-opt info`: installed versions, devices, presets and optimizers."""

from __future__ import annotations

from pathlib import Path


def info() -> None:
    """Print versions, devices, presets and optimizers."""
    from rm_optimizer.records.provenance import commit, machine, versions
    from rm_optimizer.schema import config_root
    from rm_optimizer.schema.store import OPTIMIZERS

    _section("versions", {**versions(), "commit": commit() or "installed package"})
    _section("machine", {**machine(), **devices()})
    print(f"presets in {config_root()}")
    for group, names in presets().items():
        print(f"  {group:<14}{', '.join(names)}")
    print(f"optimizers\n  {', '.join(sorted(OPTIMIZERS))}")


def devices() -> dict[str, str]:
    """Description of each accelerator by its name in torch."""
    import torch

    if not torch.cuda.is_available():
        return {"accelerator": "none (cpu)"}
    names = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {f"cuda:{i}": f"{item.name}, {item.total_memory / 2**30:.0f} GiB" for i, item in enumerate(names)}


def presets() -> dict[str, list[str]]:
    """Preset names of each group, read from the package's folder of presets."""
    from rm_optimizer.schema import config_root

    groups = sorted(folder for folder in Path(config_root()).iterdir() if folder.is_dir())
    return {group.name: sorted(file.stem for file in group.glob("*.yaml")) for group in groups}


def _section(title: str, rows: dict[str, str]) -> None:
    print(title)
    for name, value in rows.items():
        print(f"  {name:<20}{value}")
