"""The same chats three ways: transformers' generate, the same call patched, and fastgen.generate.

python examples/quickstart.py
python examples/quickstart.py --model NAME --dtype bfloat16
"""

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import fastgen
from fastgen.demo import load_default

QUESTIONS = [
    "What is the capital of France?",
    "Count from one to ten.",
    "Name three colours.",
    "Why is the sky blue? Answer in one sentence.",
    "Explain to a child how a bicycle stays upright.",
    "Translate 'good morning' into French, Spanish and Italian.",
    "Write a haiku about the sea in winter.",
    "What is the difference between a list and a tuple in Python, and when would you use which?",
    "I have eggs, flour, milk and a little sugar. What can I cook for four people in half an hour?",
    "Summarize in one sentence: The committee met on Monday to discuss the bridge, which has been closed since the "
    "flood in March. Repairs will take until autumn, and until then the ferry runs twice as often as before.",
    "Give me a short plan for learning to play the piano as an adult with a full-time job, half an hour a day, and no "
    "knowledge of music at all. I would like to play one simple song for my mother's birthday in three months.",
    "Hello!",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model name or folder instead of the default, SmolLM2-135M-Instruct")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--max-new-tokens", type=int, default=64)
    args = parser.parse_args()

    model, tokenizer = load(args.model, getattr(torch, args.dtype))
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    batch = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt").to(model.device)
    settings = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    expected, seconds = timed(lambda: model.generate(**batch, **settings))

    _, patching = timed(lambda: fastgen.patch(model))
    actual, patched_seconds = timed(lambda: model.generate(**batch, **settings))

    results, helper_seconds = timed(lambda: fastgen.generate(model, chats, tokenizer, **settings))

    for question, result in zip(QUESTIONS, results, strict=True):
        print(f"\n> {question}\n{result.text.strip()} [{result.finish_reason}]")

    start = batch["input_ids"].shape[1]
    alike = [
        result.token_ids == row[start : start + len(result.token_ids)]
        for result, row in zip(results, expected.tolist(), strict=True)
    ]
    print(f"\n{len(QUESTIONS)} prompts, {args.dtype} on {model.device}; patched in {patching:.2f} s")
    print(f"  model.generate, original  {seconds:7.2f} s")
    print(
        f"  model.generate, patched   {patched_seconds:7.2f} s  {seconds / patched_seconds:5.2f}x  "
        f"ids {'identical' if torch.equal(actual, expected) else 'differ'}"
    )
    print(
        f"  fastgen.generate          {helper_seconds:7.2f} s  {seconds / helper_seconds:5.2f}x  "
        f"ids identical for {sum(alike)} of {len(alike)} prompts"
    )
    print(f"\n{fastgen.status(model)}")


def load(name, dtype):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if name is None:
        model, tokenizer = load_default(dtype)
        return model.to(device), tokenizer
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype).eval().to(device), tokenizer


def timed(function):
    """What ``function`` returns, and its seconds."""
    start = time.perf_counter()
    result = function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main()
