"""Three ways to run the real TorchAir Python on a machine without CANN and without an NPU.

    from tests.torchair.setups.install import install
    torchair = install("A").torchair

Real: every Python file of TorchAir. Simulated: its C++ modules and, in set-up C, the CANN libraries
and the device.

| set-up | torch_npu                        | modes            | tensors                         |
| ------ | -------------------------------- | ---------------- | ------------------------------- |
| A      | absent                           | max-autotune     | CPU                             |
| B      | made by hand, as far as needed   | all              | CPU, but they claim `is_npu`    |
| C      | real, over generated libraries   | all              | `npu:0`, in host memory         |

No set-up tells whether GE computes the right numbers from the graph that it is given: the fake
executor runs the FX graph. What is checked is TorchAir's own tracing, passes, conversion, input
pruning and output re-assembly.
"""
