# mypy: ignore-errors
# Runs in an environment of its own that has no type stubs.
"""vLLM's engine on a CPU, stepped in this process: what it takes without a server, and without other processes."""

import os
import sys
import time

# By default vLLM leaves one of two cores to others.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, sorted(os.sched_getaffinity(0)))))
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

from protocol import answer


def main(model, max_model_len):
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model, dtype="bfloat16", max_model_len=max_model_len, max_num_seqs=16, enforce_eager=True
    ).llm_engine
    numbers = iter(range(1 << 62))

    def run(question):
        prompts, num_tokens = question["prompts"], question["tokens"]
        sampling = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        began = time.perf_counter()
        for prompt in prompts:
            engine.add_request(str(next(numbers)), {"prompt_token_ids": prompt}, sampling)
        counts = dict.fromkeys(range(len(prompts)), 0)
        first_s, steps_s, tokens = None, [], {}
        while engine.has_unfinished_requests():
            before = time.perf_counter()
            outputs = engine.step()
            now = time.perf_counter()
            for output in outputs:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
            if first_s is not None:
                steps_s.append(now - before)
            elif len(tokens) == len(counts):
                first_s = now - began
        return {"first_s": first_s, "steps_s": steps_s, "tokens": [tokens[key] for key in sorted(tokens, key=int)]}

    answer(run)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
