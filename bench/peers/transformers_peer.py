# mypy: ignore-errors
"""The model of transformers with its own KV cache, called step by step: greedy, without ``generate`` around it."""

import os
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"

from protocol import answer


def main(model):
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(question):
        ids, past, times, tokens = torch.tensor(question["prompts"]), None, [], []
        with torch.inference_mode():
            for _ in range(question["tokens"]):
                before = time.perf_counter()
                out = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
                ids, past = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
                tokens.append(ids[:, 0].tolist())
                times.append(time.perf_counter() - before)
        return {"first_s": times[0], "steps_s": times[1:], "tokens": list(zip(*tokens, strict=True))}

    answer(run)


if __name__ == "__main__":
    main(sys.argv[1])
