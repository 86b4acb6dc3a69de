"""How far eigenvalues would move if other pairs had been drawn."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, jvp

from rm_optimizer.core.batching import AnyPairBatch
from rm_optimizer.core.estimate import Estimate, cluster_bootstrap
from rm_optimizer.errors import ConfigError
from rm_optimizer.landscape.forward import RewardsModule, load_forward_rules
from rm_optimizer.landscape.objective import PairObjective

STEPS = {torch.float32: 1e-2, torch.float64: 1e-4}
"""Distance to either side, along a unit vector; rounding and the fourth derivative then matter below about 1e-4."""


def pair_curvatures(
    objective: PairObjective, vectors: Float[Tensor, "vectors parameters"]
) -> Float[Tensor, "pairs vectors"]:
    """Second derivative of each pair's loss along each vector, `v^T H_i v`, by differences of forward derivatives.

    Raises:
        ConfigError: if the model has no forward derivatives, or the pairs lie in several processes.
    """
    if objective.group is not None:
        raise ConfigError("the sampling error over pairs needs all pairs in one process; give it all and no group")
    objective.require_still()
    load_forward_rules()
    columns = [torch.cat([_along(objective, batch, vector) for batch in objective.batches]) for vector in vectors]
    return objective.checked(torch.stack(columns, dim=1).double())


def sampling_error(
    objective: PairObjective, vectors: Float[Tensor, "vectors parameters"], *, num_bootstrap: int = 1000, seed: int = 0
) -> tuple[Estimate, ...]:
    """Each vector's Rayleigh quotient with its error over pairs, by resampling pairs with their curvatures.

    For an eigenvector that is the eigenvalue's error to first order, in which the vector stays as it is.
    """
    curvatures = pair_curvatures(objective, vectors).cpu().numpy()
    weights = torch.cat([batch.weight for batch in objective.batches]).double().cpu().numpy()
    sums = np.column_stack([curvatures * weights[:, None], weights])
    return cluster_bootstrap(
        sums, lambda totals: totals[..., :-1] / totals[..., -1:], num_bootstrap=num_bootstrap, seed=seed
    )


def _along(objective: PairObjective, batch: AnyPairBatch, vector: Tensor) -> Tensor:
    """Central difference of the pairs' slopes along the vector: some activations have no second forward derivative."""
    step = STEPS[objective.dtype]
    try:
        ahead, behind = (_slopes(objective, batch, vector, place) for place in (step, -step))
    except (RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"{type(objective.model.model).__name__} has no forward derivatives; set num_sampled=0 to do without the "
            "sampling error over pairs"
        ) from error
    return (ahead - behind) / (2 * step)


@torch.no_grad()
def _slopes(objective: PairObjective, batch: AnyPairBatch, vector: Tensor, place: float) -> Tensor:
    module = RewardsModule(objective.model)
    direction = dict(zip(objective.subset.names, objective.subset.unflatten(vector), strict=True))
    at = zip(objective.subset.names, objective.parameters, strict=True)
    point = {f"reward_model.{name}": parameter + place * direction[name] for name, parameter in at}
    tangent = {f"reward_model.{name}": part for name, part in direction.items()}

    def losses(point: dict[str, Tensor]) -> Tensor:
        return objective.pair_losses(functional_call(module, point, (batch,)), batch)

    slopes: Tensor = jvp(losses, (point,), (tangent,))[1]
    return slopes
