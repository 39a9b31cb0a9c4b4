"""`fastweights bench kernels`: the GPU kernels compared with float64, then timed beside their rivals."""
