"""The paper's figures and tables, one file each. To add one, write its file and add it here."""

from fastweights.experiments.beyond import wikipedia, wikipedia_fast, wikitext2
from fastweights.experiments.engine.experiment import Experiment
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

_FIGURES = (fig1_dpfp, fig2_capacity, fig3_update_rules, fig4_curves600, fig5_capacity2)
_TABLES = (table1, table2, table3, table4, table5, table6, wikitext2, wikipedia, wikipedia_fast, speed)

EXPERIMENTS: dict[str, Experiment] = {file.EXPERIMENT.name: file.EXPERIMENT for file in (*_FIGURES, *_TABLES)}
