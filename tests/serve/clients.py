"""Official client libraries: all endpoints with and without streams, tools, schemas, errors, retries, cancelling."""

import asyncio
import hashlib
import json
import threading
import time

import openai as sdk
from jsonschema import validate
from pydantic import BaseModel
from server import Skip, check

WEATHER = {
    "type": "object",
    "required": ["city", "days"],
    "additionalProperties": False,
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells the weather", "parameters": WEATHER}}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
# The model is free to think before a call, and the small one here would do so in almost all answers without an end.
NO_THINKING = {"bad_words": ["<th"]}
MESSAGES = [{"role": "user", "content": "Once upon a time"}]


def client(server, key="none", **options):
    return sdk.OpenAI(base_url=server.url + "/v1", api_key=key, **({"max_retries": 0, "timeout": 120} | options))


def joined(stream):
    """Joins the deltas of a stream of a conversation: content, calls, reasons, usage."""
    content, calls, finish, usage = "", {}, None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            content += choice.delta.content or ""
            finish = choice.finish_reason or finish
            for part in choice.delta.tool_calls or []:
                call = calls.setdefault(part.index, ["", ""])
                call[0] += part.function.name or ""
                call[1] += part.function.arguments or ""
    return content, [tuple(call) for _, call in sorted(calls.items())], finish, usage


def completions(api, model):
    ask = {"model": model, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}
    whole = api.completions.create(**ask, logprobs=3, echo=True)
    choice = whole.choices[0]
    check(choice.text.startswith("Once upon a time"), f"echo: {choice.text}")
    check(whole.usage.completion_tokens == 24 and choice.finish_reason == "length", f"usage: {whole.usage}")
    lists = choice.logprobs
    check(len(lists.tokens) == whole.usage.total_tokens == len(lists.text_offset), "a log-probability for each token")
    check(
        lists.token_logprobs[0] is None and all(value <= 0 for value in lists.token_logprobs[1:]), "log-probabilities"
    )
    plain = api.completions.create(**ask).choices[0].text
    check(choice.text == ask["prompt"] + plain, "echo shows the prompt and the same answer")
    chunks = list(api.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    check(streamed == plain, f"streamed {streamed!r}, whole {plain!r}")
    check(chunks[-1].usage.completion_tokens == 24 and not chunks[-1].choices, "the last chunk has the usage")
    several = api.completions.create(**ask | {"prompt": ["Once", "One day"], "temperature": 1}, n=2, seed=7)
    check([choice.index for choice in several.choices] == [0, 1, 2, 3], "four choices in order")
    stopped = api.completions.create(**ask | {"max_tokens": 200}, stop=["."])
    check("." not in stopped.choices[0].text and stopped.choices[0].finish_reason == "stop", "stop text")
    return 7


def chat(api, model):
    ask = {"model": model, "messages": MESSAGES, "max_completion_tokens": 24, "temperature": 0}
    whole = api.chat.completions.create(**ask, logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    check(len(choice.logprobs.content) == 24 and len(choice.logprobs.content[0].top_logprobs) == 2, "log-probabilities")
    content, _, finish, usage = joined(
        api.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    )
    check((content, finish) == (choice.message.content, choice.finish_reason), f"streamed {content!r}: {choice}")
    check(usage.completion_tokens == whole.usage.completion_tokens == 24, f"usage {usage}")
    check(len(api.chat.completions.create(**ask | {"temperature": 1}, n=3).choices) == 3, "three choices")

    class Animal(BaseModel):
        name: str
        legs: int

    long = ask | {"max_completion_tokens": 400, "temperature": 1, "seed": 3}
    parsed = api.chat.completions.parse(**long, response_format=Animal)
    check(isinstance(parsed.choices[0].message.parsed, Animal), f"parsed answer: {parsed.choices[0]}")
    shape = {"type": "json_schema", "json_schema": {"name": "w", "strict": True, "schema": WEATHER}}
    content, *_ = joined(api.chat.completions.create(**long, response_format=shape, stream=True))
    validate(json.loads(content), WEATHER)
    return 6


def calling(ask, is_call):
    """Returns the first answer with a call, and its seed: an answer can end early at its limit of tokens."""
    for seed in range(20):
        answer = ask(seed)
        if is_call(answer):
            return seed, answer
    check(False, f"found no call in 20 answers that must have one: {answer}")


def tools(api, model):
    ask = {
        "model": model,
        "messages": MESSAGES,
        "max_completion_tokens": 300,
        "temperature": 1,
        "tools": [TOOL, CLOCK],
        "extra_body": NO_THINKING,
    }
    named = {"type": "function", "function": {"name": "clock"}}
    for choice in ("required", named):
        more = ask | {"tool_choice": choice, "parallel_tool_calls": False}
        seed, answer = calling(
            lambda seed: api.chat.completions.create(**more, seed=seed),
            lambda answer: answer.choices[0].finish_reason != "length",
        )
        whole = answer.choices[0]
        check(whole.finish_reason == "tool_calls" and len(whole.message.tool_calls) == 1, f"{choice}: {whole}")
        call = whole.message.tool_calls[0]
        validate(
            json.loads(call.function.arguments), WEATHER if call.function.name == "weather" else {"type": "object"}
        )
        check(choice == "required" or call.function.name == "clock", f"the named function is called: {call}")
        _, calls, finish, _ = joined(api.chat.completions.create(**more, seed=seed, stream=True))
        check((calls, finish) == ([(call.function.name, call.function.arguments)], "tool_calls"), f"streamed: {calls}")
    answered = MESSAGES + [
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "It is noon."},
    ]
    after = api.chat.completions.create(**ask | {"messages": answered, "max_completion_tokens": 8}, tool_choice="none")
    check(after.choices[0].message.content is not None and not after.choices[0].message.tool_calls, f"{after}")
    auto = api.chat.completions.create(**ask | {"max_completion_tokens": 16}, tool_choice="auto")
    check(auto.choices[0].finish_reason in ("length", "stop", "tool_calls"), f"{auto}")
    return 6


def responses(api, model):
    """The Responses API, if the server has it."""
    ask = {"model": model, "input": "Once upon a time", "max_output_tokens": 24, "temperature": 0}
    try:
        whole = api.responses.create(**ask)
    except sdk.NotFoundError as e:
        if e.code == "not_found":
            return 0
        raise
    check(whole.output_text and whole.store is not True, f"an answer that is not stored: {whole}")
    pieces = [
        event.delta for event in api.responses.create(**ask, stream=True) if event.type == "response.output_text.delta"
    ]
    check("".join(pieces) == whole.output_text, f"streamed {pieces}: {whole.output_text!r}")
    tool = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
    more = ask | {
        "max_output_tokens": 300,
        "temperature": 1,
        "tools": [tool],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    _, called = calling(
        lambda seed: api.responses.create(**more, extra_body=NO_THINKING | {"seed": seed}),
        lambda answer: answer.status == "completed",
    )
    calls = [item for item in called.output if item.type == "function_call"]
    check(calls, f"a call: {called.output}")
    validate(json.loads(calls[0].arguments), WEATHER)
    shape = {"format": {"type": "json_schema", "name": "w", "strict": True, "schema": WEATHER}}
    validate(json.loads(api.responses.create(**ask | {"max_output_tokens": 300}, text=shape).output_text), WEATHER)
    try:
        api.responses.create(**ask, previous_response_id="resp_1")
        check(False, "previous_response_id is refused")
    except sdk.BadRequestError as e:
        check(e.param == "previous_response_id", f"{e}")
    return 5


async def together(server, model):
    """Sends requests at the same time; the answers are those that come alone."""
    api = sdk.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)

    async def one(seed):
        stream = await api.chat.completions.create(
            model=model, messages=MESSAGES, max_completion_tokens=32, seed=seed, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])

    alone = [await one(seed) for seed in range(8)]
    check(await asyncio.gather(*map(one, range(8))) == alone, "eight answers together are those that come alone")
    await api.close()


def cancel(server, api, model):
    """Closes streams early; their requests end and free their pages."""
    before = server.metric("iec_cancelled_total")
    for _ in range(4):
        stream = api.completions.create(
            model=model, prompt="Once", max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in zip(range(3), stream):
            pass
        stream.close()
    server.wait_until_idle()
    check(server.metric("iec_cancelled_total") == before + 4, "four requests were cancelled")


def openai(context):
    server = context.serve("--model", f"story={context.story()}")
    api = client(server)
    models = [model.id for model in api.models.list()]
    check(models == ["story"] and api.models.retrieve("story").id == "story", f"models: {models}")
    counts = [part(api, "story") for part in (completions, chat, tools, responses)]
    asyncio.run(together(server, "story"))
    cancel(server, api, "story")
    extra = "" if counts[3] else ", without /v1/responses, which this server does not have"
    return f"openai {sdk.__version__}, {sum(counts)} calls checked, 8 together, 4 cancelled{extra}"


def key_file(context, *keys):
    """Writes a file of keys: pairs of a text and lines of limits."""
    path = context.work / f"keys-{time.monotonic_ns()}.toml"
    entry = '[[key]]\nname = "{0}"\nsha256 = "{1}"\n{2}\n'
    path.write_text(
        "".join(entry.format(text, hashlib.sha256(text.encode()).hexdigest(), limits) for text, limits in keys)
    )
    return path


def expect(kind, status, call, **members):
    """Checks that a call raises this error."""
    try:
        call()
    except sdk.APIStatusError as e:
        check(type(e) is kind and e.status_code == status, f"found {type(e).__name__} {e}, expected {kind.__name__}")
        for name, value in members.items():
            check(getattr(e, name) == value, f"{name} of {e}: found {getattr(e, name)}, expected {value}")
        return
    check(False, f"found no error, expected {kind.__name__}")


def openai_errors(context):
    keys = key_file(context, ("free", ""), ("slow", "rpm = 1"), ("watcher", 'scopes = ["metrics"]'))
    server = context.serve("--model", f"story={context.story()}", "--api-key-file", keys)
    api = client(server, "free")
    ask = {"model": "story", "prompt": "Once", "max_tokens": 4}
    create = api.completions.create
    expect(sdk.BadRequestError, 400, lambda: create(**ask, suffix="x"), param="suffix", code="unsupported_parameter")
    expect(sdk.BadRequestError, 400, lambda: create(**ask | {"prompt": [1] * 3000}), code="context_length_exceeded")
    expect(sdk.NotFoundError, 404, lambda: create(**ask | {"model": "none"}), code="model_not_found")
    expect(sdk.AuthenticationError, 401, lambda: client(server, "wrong").completions.create(**ask))
    expect(sdk.PermissionDeniedError, 403, lambda: client(server, "watcher").completions.create(**ask))
    expect(sdk.InternalServerError, 501, lambda: api.embeddings.create(model="story", input="x"))
    expect(
        sdk.InternalServerError,
        504,
        lambda: create(
            **ask | {"max_tokens": 1900}, extra_body={"ignore_eos": True}, extra_headers={"x-iec-deadline-ms": "100"}
        ),
    )
    slow = client(server, "slow")
    slow.completions.create(**ask)
    expect(sdk.RateLimitError, 429, lambda: slow.completions.create(**ask), code="rate_limit_exceeded")
    server.kill()
    return f"8 kinds of errors; {retries(context)}"


def retries(context):
    """Sends more requests than the queue holds; the client repeats those that are refused."""
    server = context.serve("--model", f"story={context.story()}", "--max-seqs", "1", "--max-queue", "1")
    api = client(server, max_retries=20)
    texts, problems = [], []

    def one():
        try:
            answer = api.completions.create(
                model="story", prompt="Once", max_tokens=400, temperature=0, extra_body={"ignore_eos": True}
            )
            texts.append(answer.choices[0].text)
        except sdk.OpenAIError as e:
            problems.append(e)

    threads = [threading.Thread(target=one) for _ in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    refused = server.metric("vllm:admission_rejections_total")
    check(not problems and len(texts) == 6 and len(set(texts)) == 1, f"all requests get an answer: {problems}")
    check(refused > 0, "the queue was full at some time")
    return f"6 requests of a queue of 1 repeated {refused:.0f} refusals until all had an answer"


def anthropic(context):
    import anthropic as sdk_of_anthropic

    server = context.serve("--model", f"story={context.story()}")
    status, _, text = server.request("POST", "/v1/messages", {})
    if status == 404 and "not_found" in text:
        raise Skip("the server has no /v1/messages")
    api = sdk_of_anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    # This model reads every message as the beginning of a story.
    ask = {"model": "story", "max_tokens": 24, "messages": MESSAGES, "extra_body": {"temperature": 0}}
    whole = api.messages.create(**ask)
    check(whole.content[0].text and whole.stop_reason == "max_tokens", f"{whole}")
    check(whole.usage.output_tokens == 24, f"{whole.usage}")
    with api.messages.stream(**ask) as stream:
        streamed = "".join(stream.text_stream)
        final = stream.get_final_message()
    check(streamed == whole.content[0].text and final.stop_reason == whole.stop_reason, f"streamed {streamed!r}")
    check(final.usage.output_tokens == 24, f"{final.usage}")
    counted = api.messages.count_tokens(model="story", messages=MESSAGES).input_tokens
    check(counted == whole.usage.input_tokens, f"counted {counted}, used {whole.usage.input_tokens}")
    tool = {"name": "weather", "description": "Tells the weather", "input_schema": WEATHER}
    more = ask | {"max_tokens": 300, "tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    extra = NO_THINKING | {"temperature": 1}
    seed, called = calling(
        lambda seed: api.messages.create(**more | {"extra_body": extra | {"seed": seed}}),
        lambda answer: answer.stop_reason != "max_tokens",
    )
    uses = [block for block in called.content if block.type == "tool_use"]
    check(uses and called.stop_reason == "tool_use", f"a call: {called}")
    validate(uses[0].input, WEATHER)
    with api.messages.stream(**more | {"extra_body": extra | {"seed": seed}}) as stream:
        uses = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    check(uses, "a streamed call")
    validate(uses[0].input, WEATHER)
    stopped = api.messages.create(**ask | {"max_tokens": 200}, stop_sequences=["."])
    check(stopped.stop_reason == "stop_sequence" and stopped.stop_sequence == ".", f"{stopped}")
    for kind, change in (
        (sdk_of_anthropic.NotFoundError, {"model": "none"}),
        (sdk_of_anthropic.BadRequestError, {"max_tokens": 0}),
    ):
        try:
            api.messages.create(**ask | change)
            check(False, f"found no error for {change}")
        except sdk_of_anthropic.APIStatusError as e:
            check(type(e) is kind, f"found {type(e).__name__} for {change}")
    server.wait_until_idle()
    return f"anthropic {sdk_of_anthropic.__version__}: messages, streams, tools, counts, errors"


def adapters(context):
    """Loads one adapter from many connections at the same time: one of them succeeds, the others are in conflict."""
    server = context.serve("--model", f"llama={context.llama()}", "--adapter-dir", context.adapters())
    base = server.complete("Once", model="llama", max_tokens=8, ignore_eos=True)
    changed = None
    for round_number in range(10):
        found = []
        load = {"lora_name": "one", "lora_path": "r16-all"}
        threads = [
            threading.Thread(target=lambda: found.append(server.request("POST", "/v1/load_lora_adapter", load)[0]))
            for _ in range(6)
        ]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        check(sorted(found) == [200] + [409] * 5, f"round {round_number}: statuses {sorted(found)}")
        text = server.complete("Once", model="one", max_tokens=8, ignore_eos=True)
        changed = changed or text
        check(text == changed != base, f"the adapter changes the answer: {text!r}, {base!r}")
        status, _, text = server.request("POST", "/v1/unload_lora_adapter", {"lora_name": "one"})
        check(status == 200, f"unloading: status {status}: {text}")
    check(server.complete("Once", model="llama", max_tokens=8, ignore_eos=True) == base, "the base is as before")
    return "10 times, one of 6 loads at the same time succeeded and 5 were in conflict"
