"""Iterate over a pipeline: loops, ranks and workers, and their positions.

Who knows what:

- A `Snapshot` is a pipeline as a program has it when a loop begins: stages, seed, and the
  `Extent`, the length of a loop. `WorkerInfo` tells the rank and worker in which it runs.
- `Passes` yields the items of one pass over the data after another. It is the position in the
  data: the number of the pass, and the states of the stages within it.
- A `Loop` yields the items of one `for` loop. It is a position in the run: the number of the loop,
  how many of its items were yielded, and the `Passes` they come from, which it takes over from the
  loop before if the extent says that loops continue.
- Copies of a pipeline in workers have to agree on the number of the next loop, which
  `EpochCounter` counts in shared memory; and if a new worker continues where another one has
  stopped, it finds the position in `WorkerNotes`.
- `LanePipeline` runs all of this for energon's loader, where each worker of the job is a lane.
"""
