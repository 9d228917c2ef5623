"""Who reads which samples in which order: arithmetic on integers, nothing else.

Lanes. A run is divided into V lanes, fixed streams of batches. Ranks and workers only host
lanes, so an order that is a function of (configuration, seed, lane, row) depends on neither.

Rows. `plan.rows(lane, start, count)` returns arrays that say for each row of a lane which
leaf, which epoch of it and which sample come there. It is a pure function: any start costs
the same, any cut yields the same rows, and nothing has to be remembered.

Epochs. The k-th draw of lane v from a leaf of n samples is draw number K = k·V + v of that leaf. K
// n is the epoch, K % n the position in it, and the positions of an epoch are mapped to samples by
a permutation. As no two draws share a number, every finished epoch holds each sample exactly once,
on any rank and in any blend (`leaves/leaf_order.py`).

Permutations are Feistel networks with cycle walking, keyed with a hash of what they are for:
no table is ever built, so sizes do not matter (`randomness.py`).

Locality. Reading single samples at random is slow, so the permutation moves *slices* of L
consecutive samples and, inside a lane, mixes the rows of windows of S slices. At most S
slices of a leaf are open in a lane, and every slice is read whole. L = 1 is a true global
shuffle.

Blends are stratified patterns of sources (`blends/blend.py`), which realise the weights
almost exactly in every interval and count draws in closed form. Weights form a tree
(`blends/mix.py`) and may change over a run (`blends/curve.py`). Between two changes lies a stage
with a pattern of its own, and draws continue from one stage to the next without a gap
(`blends/blend.py`), also where a source is used up or a run was restored with another mix.
Epochized blends and validation lay leaves end to end as one line (`line.py`); a line may be a
source of a blend. What a shuffle buffer would do is a permutation of rows in windows (`rows.py`).

All of it can be undone: when a sample is drawn is computed backwards (`leaves/leaf_order.py`).

Subsets and excluded samples change what an ordinal means, not the order (`leaves/subset.py`).
How good a shuffle is can be measured (`randomness.py`).
"""
