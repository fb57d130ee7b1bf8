"""What happens at run time: a worker's stage, its weights, its messages, and the processes around them.

In the order of a run: `launch` (processes) → `worker` (what one process does) or `local_run` (all in one) →
`feed` (data) and `assembly` (loads a worker) → `loop`, or `local` for all workers in turn → `executor` (one
action) with `loaded_stage`, `weights` (from `demand`: who reads which version; `gradients`), `transport`
(`distributed`, `mailbox`; `layout` is the form of a value on its way) → `evaluator` between two actions and at the end
(`evaluation_data`, `distributed_evaluation`, `local_evaluation`) → `record`, `final_weights`.
"""
