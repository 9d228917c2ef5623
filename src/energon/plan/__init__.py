"""Who reads which samples in which order: arithmetic on integers, nothing else.

Lanes. A run is divided into V lanes, fixed streams of batches. Ranks and workers only host
lanes, so an order that is a function of (configuration, seed, lane, row) depends on neither.

Rows. `plan.rows(lane, start, count)` returns arrays that say for each row of a lane which
leaf, which epoch of it and which sample come there. It is a pure function: any start costs
the same, any cut gives the same rows, and nothing has to be remembered.

Epochs. The k-th draw of lane v from a leaf of n samples is draw number K = k·V + v of that
leaf. K // n is the epoch, K % n the position in it, and the positions of an epoch are mapped
to samples by a permutation. As no two draws share a number, every finished epoch holds each
sample exactly once, whoever drew it and whatever else was blended in between (`leaf.py`).

Permutations are Feistel networks with cycle walking, keyed with a hash of what they are for:
no table is ever built, so sizes do not matter (`permutation.py`, `seeds.py`).

Locality. Reading single samples at random is slow, so the permutation moves *slices* of L
consecutive samples and, inside a lane, mixes the rows of windows of S slices. At most S
slices of a leaf are open in a lane, and every slice is read whole. L = 1 is a true global
shuffle.

Blends are a stratified pattern of leaves that realises the weights almost exactly in every
interval and counts draws in closed form, also when weights change at some row (`blend.py`).
Epochized blends and validation lay leaves end to end as one line (`line.py`). What a shuffle
buffer would do is a permutation of rows in windows (`window.py`).

Subsets and excluded samples change what an ordinal means, not the order (`subset.py`,
`excludes.py`). How good a shuffle is can be measured (`quality.py`).
"""
