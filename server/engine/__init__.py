# SPDX-License-Identifier: Apache-2.0
"""Text in, text out, by token ids on one owner thread of one engine process.

    engine     in the gateway: template, tokenise, submit, detokenise, cancel; resubmits after a crash
    process    the engine's own OS process: messages in and out, heartbeat, supervision
    loop       in the engine process: step() = schedule → forward → sample → commit
    scheduler  pure: who computes what in the next step · admission  pure: who may wait, and who is next
    sequence   the words they share: Submission, Sequence, Step, StepOutput
    kv         keys and values: slots of running rows
    compute    numbers: runner (ONNX Runtime), sampler, threads
    text       tokens ⇄ text

Only `compute` and `kv` know arrays; only `loop` and what stands below it runs in the engine process.
"""
