"""Figure 1: DPFP takes the plane to four dimensions, one for each quadrant [Sec. 5.4].

Nothing is trained. The cell evaluates the library's own `feature_map("dpfp", d_key=2, nu=1)` on a square grid and keeps
the four surfaces with what was measured on them. The paper writes the products in another order than its Listing 1;
the surfaces are matched to the equations whatever their order.
"""

from collections.abc import Mapping
from typing import Any

import torch

from fastweights.experiments.engine.experiment import NOT_RUN, Claim, Plot, Results, Scale
from fastweights.experiments.engine.runner import measured
from fastweights.experiments.engine.shape import Shape
from fastweights.feature_maps import feature_map

# Points along one side of the square. Even numbers, so that none lies on an axis, where every product is zero.
SCALES = {
    "smoke": Scale(sizes=(8,), cost="1 s", note="A coarse grid."),
    "small": Scale(sizes=(24,), cost="1 s"),
    "code": Scale(sizes=(24,), cost="1 s"),
    "paper": Scale(sizes=(24,), cost="1 s"),
}
STORED: Shape = {
    "metrics": dict.fromkeys(("points", "least_nonzero", "most_nonzero"), int)
    | dict.fromkeys(("largest_overlap", "distance_to_equations"), float)
    | {"shares": [float], "axis": [float], "surfaces": [[[float]]]}
}


def configure(scale: str, model: str, size: int, seed: int) -> Mapping[str, Any]:
    return {"scale": scale, "model": model, "rule": "none", "size": size, "seed": seed, "d_key": 2, "nu": 1}


def measure(config: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate phi on a grid over [-1, 1]²: its surfaces, zeros, overlaps, and distance to the equations."""
    points = config["size"]
    axis = torch.linspace(-1, 1, points, dtype=torch.float64)
    plane = torch.cartesian_prod(axis, axis)
    phi = feature_map("dpfp", d_key=config["d_key"], nu=config["nu"])(plane)
    quadrant = (plane[:, 0] > 0).long() + 2 * (plane[:, 1] > 0).long()
    products = phi @ phi.mT
    apart = quadrant[:, None] != quadrant[None, :]

    x, y = plane.unbind(-1)
    equations = torch.stack([(s * x).relu() * (t * y).relu() for s in (1, -1) for t in (1, -1)], -1)
    # Each equation is compared with the component nearest to it.
    distance = (equations[:, :, None] - phi[:, None, :]).abs().amax(0).amin(-1).max()
    return {
        "points": len(plane),
        "least_nonzero": int((phi > 0).sum(-1).min()),
        "most_nonzero": int((phi > 0).sum(-1).max()),
        "shares": [float(share) for share in (phi > 0).double().mean(0)],
        "largest_overlap": float(products[apart].abs().max()),
        "distance_to_equations": float(distance),
        "axis": axis.tolist(),
        "surfaces": phi.mT.reshape(-1, points, points).tolist(),
    }


STATEMENTS = {
    "Off the axes, every point has exactly one non-zero component": "exactly one",
    "The four components split the plane equally": "a quarter each",
    "Points of different quadrants are orthogonal after the projection": "φ(x)·φ(y) = 0",
    "The library's DPFP-1 is the four products φ₁ … φ₄ of Sec. 5.4": "equal, in any order",
}


def claims(results: Results) -> list[Claim]:
    if not results.records:
        return [Claim(text, NOT_RUN, paper, None) for text, paper in STATEMENTS.items()]
    m = results.records[0].metrics
    least, most, shares = m["least_nonzero"], m["most_nonzero"], m["shares"]
    count = "exactly one" if least == most == 1 else f"{least} to {most}"
    found = [
        (f"{count} at {m['points']} points", least == most == 1),
        (", ".join(f"{share:.0%}" for share in shares), len(shares) == 4 and set(shares) == {0.25}),
        (f"largest φ(x)·φ(y): {m['largest_overlap']:g}", m["largest_overlap"] == 0),
        (f"largest difference: {m['distance_to_equations']:g}", m["distance_to_equations"] < 1e-12),
    ]
    statements = zip(STATEMENTS.items(), found, strict=True)
    return [Claim(text, ours, paper, holds) for (text, paper), (ours, holds) in statements]


EXPERIMENT = measured(
    measure,
    name="fig1",
    title="DPFP from two to four dimensions",
    where="Figure 1, Sec. 5.4",
    statement="Each vector in the plane has a single non-zero component in the four-dimensional space, which splits "
    "the plane equally into four areas that are orthogonal after the projection.",
    models={"dpfp-1": "DPFP-1"},
    scales=SCALES,
    configure=configure,
    claims=claims,
    plot=Plot(kind="surfaces", x_label="k₁", y_label="k₂"),
    stored=STORED,
)
