"""What happens at run time: a worker's stage, its weights, its messages, and the processes around them.

In the order of a run: `launch` (processes) → `worker` (what one process does) or `local_run` (all in one) →
`assembly` (loads a worker) → `executor` (walks actions) with `stage`, `weights` (and `demand`), `transport`
(`local`, `distributed`; `wire` is the form of a value on its way) → `record`, `final_weights`.
"""
