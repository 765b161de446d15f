"""Another MLX server with the OpenBLAS that this project loads, in the other's own environment.

    python launch_with_blas.py PROJECT MODULE ARGUMENTS...

PROJECT is this project's folder, from which nothing but kernel.blas is taken.
"""

import runpy
import sys

project, module = sys.argv[1:3]
sys.path.insert(0, project)
from kernel.blas import load_blas  # noqa: E402

print(load_blas(), flush=True)
sys.path.remove(project)
for name in [name for name in sys.modules if name.split(".")[0] == "kernel"]:
    del sys.modules[name]
sys.argv[:] = [module, *sys.argv[3:]]
runpy.run_module(module, run_name="__main__", alter_sys=True)
