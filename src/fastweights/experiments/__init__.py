"""The paper's figures and tables, one file each.

An experiment is a file with an `EXPERIMENT`. Those of the package are listed here, in the order of the page; a file of
your own calls `register_experiment` itself.
"""

from fastweights.experiments.engine.register import EXPERIMENTS, load_experiments, register_experiment
from fastweights.experiments.paper import (
    fig1_dpfp,
    fig2_capacity,
    fig3_update_rules,
    fig4_curves600,
    fig5_capacity2,
    speed,
    table1,
    table2,
    table3,
    table4,
    table5,
    table6,
)

__all__ = ["EXPERIMENTS", "load_experiments", "register_experiment"]

_FIGURES = (fig1_dpfp, fig2_capacity, fig3_update_rules, fig4_curves600, fig5_capacity2)
_TABLES = (table1, table2, table3, table4, table5, table6, speed)

for _module in (*_FIGURES, *_TABLES):
    register_experiment(_module.EXPERIMENT)
