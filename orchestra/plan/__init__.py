"""The planner: memory per device and step time of a layout, from integers and a few measured constants.

Callers begin with `predict.predict`; `calibrate` alone reads the files of runs. No torch is loaded and no
process is started.

What it assumes. Every rank of a stage is alike, and every node. A step is m micro-batches on the slowest
stage, a bubble, and what the backward pass does not hide of the gradients' reduction. A layer takes the
longer of what the device and what the host need. Products reach one share of the peak where their tiles
fill the device (nanotron's: whatever their shape); everything that is neither product nor attention is memory
traffic in proportion to tokens × hidden size.
Collectives do not overlap with products. Attention is causal flash attention, but in older trainers. Experts
get equally many tokens, and nothing hides their exchange.

Memory of orchestra's own trainer is counted as it allocates (`orchestra.sizes.memory`, compared with real
modules by `orchestra plan --exact`); of others by closed forms and their profiles. On CPUs ranks share the
cores, the host's work adds to the products', and nothing hides a message.

Where it fails. Single runs on a real cluster stray far: of the playbook's pipelines over several nodes a
third waits half a second at each hand-over, and about three in ten of those cannot be told beforehand; such
rows are off by up to thirty times. Tensor parallelism over four nodes without a pipeline is slower than
predicted for wide models. Long sequences depend on the attention kernel. Peak memory near the device's limit
depends on the allocator. Overlap, host time and networks of other trainers than nanotron are assumed, and
their profiles say so. Of mixtures of experts, releases of one trainer differ by up to three times.
"""
