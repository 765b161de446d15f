"""MLX: weights, pages, attention, the forward, sampling, and what they observe.

How data flows through a step:

    batch.Batch -> metadata.build (host numpy: positions, slots, tables, bounds)
      -> buckets.group_rows -> context.StepContext (the same as MLX arrays)
      -> forward.Forward: the mlx-lm model, called as its layout.Layout says: packed, its layers
         meet caches.PagedCache (writes into pages.Pages, returns handles) and attention.dispatch
         (reads the pages through the tables, by a gather or by paged_attention's kernels: CUDA's
         and Metal's from paged_source/, the CPU's from native/, compiled by extension); else
         gathered.GatheredCache, which returns arrays and, of models with states,
         recurrent.StateCache (read from slots, put back at the end)
      -> adjusting.adjusted (penalties, bias, grammar.Grammars' masks; only for rows that ask)
      -> sampling.sample -> tokens and fingerprints; telling.tell -> log-probabilities, scores,
         embeddings, for who asks: the only arrays that are evaluated
    beside it: shadow.Shadow compares tags; metadata.observe reports what was used
    batch.StepResult <- model_kernel.ModelKernel.collect

What pages cannot hold runs one sequence at a time over mlx-lm's own caches, in the same protocol:
model_owned.ModelOwnedKernel. families.family_of chooses, by what layout.look sees of a model and
what probe.probe finds of its logits.
"""
