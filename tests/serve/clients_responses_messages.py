"""Checks `/v1/responses` and `/v1/messages` of a running `iec serve` with the clients of OpenAI and Anthropic.

    python clients_responses_messages.py http://127.0.0.1:8080 [API_KEY]

The script asks the server for its only or first model. A model without a chat template must refuse both endpoints; with
one that has tools and `enable_thinking`, such as `chat_template.jinja` beside this file, everything is checked. The
process exits with 1 if a check fails.
"""

import http.client
import json
import sys
import traceback
import urllib.parse
import urllib.request
from typing import Literal

import anthropic
import openai
from pydantic import BaseModel

FUNCTION = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
OPENAI_TOOL = {"type": "function", "name": "weather", "description": "Weather", "parameters": FUNCTION, "strict": True}
ANTHROPIC_TOOL = {"name": "weather", "description": "Weather", "input_schema": FUNCTION}
LENGTH = 24


class Choice(BaseModel):
    """Answer with a fixed form."""

    fruit: Literal["apple", "pear"]


SCHEMA = {
    "type": "object",
    "properties": {"fruit": {"type": "string", "enum": ["apple", "pear"]}},
    "required": ["fruit"],
    "additionalProperties": False,
}


class Server:
    """Clients of the server under test, and what its model can do."""

    def __init__(self, url, key):
        self.url = url.rstrip("/")
        self.openai = openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0)
        self.anthropic = anthropic.Anthropic(base_url=self.url, api_key=key, max_retries=0)
        self.model = self.openai.models.list().data[0].id
        info = urllib.request.Request(self.url + "/tokenizer_info", headers={"x-api-key": key})
        self.template = json.load(urllib.request.urlopen(info)).get("chat_template")

    def respond(self, **fields):
        """Creates a response with greedy sampling."""
        fields = {"model": self.model, "input": "Hello", "max_output_tokens": LENGTH, "temperature": 0} | fields
        return self.openai.responses.create(**fields)

    def message(self, **fields):
        """Creates a message with greedy sampling."""
        messages = [{"role": "user", "content": "Hello"}]
        fields = {"model": self.model, "max_tokens": LENGTH, "messages": messages} | fields
        return self.anthropic.messages.create(**fields, extra_body={"temperature": 0, "top_k": 5})

    def stream(self, **fields):
        """Streams a message with greedy sampling."""
        messages = [{"role": "user", "content": "Hello"}]
        fields = {"model": self.model, "max_tokens": LENGTH, "messages": messages} | fields
        return self.anthropic.messages.stream(**fields, extra_body={"temperature": 0, "top_k": 5})


def equal(found, expected):
    """Fails if two values differ."""
    assert found == expected, f"found {found!r}, expected {expected!r}"


def refused(kind, call, code=None, param=None):
    """Returns the exception of a call that must fail with an exception of this type."""
    try:
        call()
    except kind as error:
        if code is not None:
            equal(error.code, code)
        if param is not None:
            equal(error.param, param)
        return error
    raise AssertionError(f"found an answer, expected {kind.__name__}")


def check_no_template(server):
    """Checks that a model without a chat template refuses conversations."""
    refused(openai.BadRequestError, server.respond, code="no_chat_template")
    error = refused(anthropic.BadRequestError, server.message)
    equal(error.body["error"]["type"], "invalid_request_error")


def check_response(server):
    """Checks the members of a response that is not streamed."""
    response = server.respond(instructions="Be brief.", metadata={"a": "b"}, user="u")
    equal(response.object, "response")
    assert response.id.startswith("resp_") and response.created_at > 1_000_000_000
    equal((response.model, response.metadata, response.instructions), (server.model, {"a": "b"}, "Be brief."))
    equal((response.error, response.previous_response_id, response.tools), (None, None, []))
    equal((response.tool_choice, response.parallel_tool_calls, response.temperature), ("auto", True, 0))
    equal((response.model_extra or {}).get("store"), False)
    usage = response.usage
    equal(usage.total_tokens, usage.input_tokens + usage.output_tokens)
    assert usage.input_tokens > 0 and usage.input_tokens_details.cached_tokens >= 0
    equal(usage.output_tokens_details.reasoning_tokens, 0)
    if response.status == "incomplete":
        equal((response.incomplete_details.reason, usage.output_tokens), ("max_output_tokens", LENGTH))
    else:
        equal((response.status, response.incomplete_details), ("completed", None))
    for item in response.output:
        equal((item.type, item.role, item.content[0].type), ("message", "assistant", "output_text"))
        equal(item.content[0].annotations, [])


def stream_of(server, **fields):
    """Streams a response, checks its events, and returns the response of the last one."""
    texts, items, last = {}, {}, None
    for number, event in enumerate(server.respond(stream=True, **fields)):
        equal(event.sequence_number, number)
        if number < 2:
            equal(event.type, ["response.created", "response.in_progress"][number])
            equal((event.response.status, event.response.output), ("in_progress", []))
        if event.type == "response.output_item.added":
            equal(event.output_index, len(items))
            items[event.output_index] = event.item.id
            texts[event.output_index] = ""
        elif event.type.endswith(".delta"):
            equal(event.item_id, items[event.output_index])
            texts[event.output_index] += event.delta
        elif event.type.endswith("_text.done"):
            equal(event.text, texts[event.output_index])
        elif event.type == "response.function_call_arguments.done":
            equal(event.arguments, texts[event.output_index])
        elif event.type == "response.output_item.done":
            equal(event.item.id, items[event.output_index])
        last = event
    assert last.type in ("response.completed", "response.incomplete"), last.type
    equal([item.id for item in last.response.output], list(items.values()))
    whole = [item.arguments if item.type == "function_call" else item.content[0].text for item in last.response.output]
    equal(whole, list(texts.values()))
    return last.response


def check_response_stream(server):
    """Checks that a streamed response equals the one that is not streamed."""
    for fields in [{}, {"instructions": "Be brief.", "input": [{"role": "developer", "content": "x"}]}]:
        streamed, whole = stream_of(server, **fields), server.respond(**fields)
        equal((streamed.output_text, streamed.status), (whole.output_text, whole.status))
        equal(streamed.usage.output_tokens, whole.usage.output_tokens)


def check_response_format(server):
    """Checks answers that follow a schema, with the helpers of the client."""
    form = {"format": {"type": "json_schema", "name": "choice", "schema": SCHEMA, "strict": True}}
    response = server.respond(text=form, max_output_tokens=64)
    assert json.loads(response.output_text)["fruit"] in ("apple", "pear")
    equal((response.status, response.text.format.type), ("completed", "json_schema"))
    fields = {"model": server.model, "input": "Hello", "max_output_tokens": 300, "temperature": 0}
    with server.openai.responses.stream(**fields, text=form) as stream:
        streamed = stream.get_final_response()
    equal(streamed.output_text, response.output_text)
    parsed = server.openai.responses.parse(**fields, text_format=Choice).output_parsed
    assert parsed.fruit in ("apple", "pear")


def check_response_turns(server):
    """Checks that the items of an answer are accepted as input of the next request."""
    first = server.respond(reasoning={"effort": "low"}, include=["reasoning.encrypted_content"], store=False)
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}]
    items += [item.model_dump(exclude_none=True) for item in first.output]
    second = server.respond(input=items + [{"role": "user", "content": "More"}])
    assert second.usage.input_tokens > first.usage.input_tokens


def check_response_tools(server):
    """Checks a required call, streamed and not, and the request with its result."""
    fields = {"tools": [OPENAI_TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    fields |= {"max_output_tokens": 200, "reasoning": {"effort": "none"}}
    response, streamed = server.respond(**fields), stream_of(server, **fields)
    equal(response.status, "completed")
    calls = [item for item in response.output if item.type == "function_call"]
    equal(len(calls), 1)
    call = calls[0]
    equal((call.name, call.status, call.call_id != call.id), ("weather", "completed", True))
    equal(sorted(json.loads(call.arguments)), ["city", "days"])
    equal([item.arguments for item in streamed.output if item.type == "function_call"], [call.arguments])
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    items = [{"role": "user", "content": "Hello"}] + [item.model_dump(exclude_none=True) for item in response.output]
    again = server.respond(input=items + [result], tools=[OPENAI_TOOL], tool_choice="none")
    equal([item.type for item in again.output if item.type == "function_call"], [])
    named = server.respond(**fields | {"tool_choice": {"type": "function", "name": "weather"}})
    assert any(item.type == "function_call" for item in named.output)
    with server.openai.responses.stream(model=server.model, input="Hello", temperature=0, **fields) as stream:
        final = stream.get_final_response()
    equal([item.arguments for item in final.output if item.type == "function_call"], [call.arguments])


def check_response_reasoning(server):
    """Checks that reasoning is an item of its own."""
    options = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    whole, streamed = server.respond(**options), stream_of(server, **options)
    for response in whole, streamed:
        equal(response.output[0].type, "reasoning")
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    equal(whole.output[0].content[0].text, streamed.output[0].content[0].text)


def check_response_errors(server):
    """Checks that errors are exceptions with the name of the field."""
    bad = openai.BadRequestError
    refused(bad, lambda: server.respond(previous_response_id="resp_1"), param="previous_response_id")
    refused(bad, lambda: server.respond(conversation="conv_1"), param="conversation")
    refused(bad, lambda: server.respond(background=True), param="background")
    refused(bad, lambda: server.respond(tools=[{"type": "web_search"}]), param="tools[0].type")
    refused(bad, lambda: server.respond(tool_choice="required"), param="tool_choice")
    refused(bad, lambda: server.respond(temperature=-1))
    refused(bad, lambda: server.respond(input="long " * 100_000), code="context_length_exceeded")
    image = [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/y.png"}]}]
    refused(bad, lambda: server.respond(input=image), param="input[0].content[0]")
    refused(openai.NotFoundError, lambda: server.respond(model="missing"), code="model_not_found")
    late = {"extra_headers": {"x-iec-deadline-ms": "1"}, "max_output_tokens": 400}
    refused(openai.InternalServerError, lambda: server.respond(**late), code="deadline_exceeded")
    refused(openai.APIError, lambda: list(server.respond(stream=True, **late)), code="deadline_exceeded")


def check_message(server):
    """Checks the members of a message, and that the streamed one is equal."""
    message = server.message(system="Be brief.", metadata={"user_id": "u"})
    assert message.id.startswith("msg_")
    equal((message.type, message.role, message.model), ("message", "assistant", server.model))
    assert message.stop_reason in ("end_turn", "max_tokens")
    equal((message.stop_sequence, message.usage.cache_creation_input_tokens), (None, 0))
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    ask = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    with server.stream(system=system, messages=ask) as stream:
        joined = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    text = "".join(block.text for block in message.content if block.type == "text")
    equal((joined, streamed.stop_reason), (text, message.stop_reason))
    equal([block.model_dump() for block in streamed.content], [block.model_dump() for block in message.content])
    whole, other = message.usage, streamed.usage
    equal(whole.input_tokens + whole.cache_read_input_tokens, other.input_tokens + other.cache_read_input_tokens)
    equal(whole.output_tokens, other.output_tokens)


def check_count(server):
    """Checks that the number of tokens is that of the request."""
    fields = {"messages": [{"role": "user", "content": "Hello there"}], "system": "Be brief."}
    counted = server.anthropic.messages.count_tokens(model=server.model, **fields).input_tokens
    usage = server.message(**fields).usage
    equal(counted, usage.input_tokens + usage.cache_read_input_tokens)


def check_stop(server):
    """Checks that a stop sequence of the client is reported."""
    text = server.message().content[0].text
    stop = text[len(text) // 2 :][:2]
    message = server.message(stop_sequences=[stop])
    equal((message.stop_reason, message.stop_sequence), ("stop_sequence", stop))
    assert stop not in message.content[0].text if message.content else True


def check_prefill(server):
    """Checks that a last message of the assistant is continued."""
    ask = {"role": "user", "content": "Hello"}
    whole = server.message().content[0].text
    begun = whole[: len(whole) // 2].rstrip()
    rest = server.message(messages=[ask, {"role": "assistant", "content": begun}])
    assert rest.usage.output_tokens > 0


def check_message_tools(server):
    """Checks a required call, streamed and not, and the request with its result."""
    fields = {"tools": [ANTHROPIC_TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    fields |= {"max_tokens": 200, "thinking": {"type": "disabled"}}
    message = server.message(**fields)
    equal(message.stop_reason, "tool_use")
    calls = [block for block in message.content if block.type == "tool_use"]
    equal((len(calls), calls[0].name, sorted(calls[0].input)), (1, "weather", ["city", "days"]))
    ask = [{"role": "user", "content": "Hello"}]
    with server.stream(**fields) as stream:
        streamed = stream.get_final_message()
    equal([block.input for block in streamed.content if block.type == "tool_use"], [calls[0].input])
    equal(streamed.stop_reason, "tool_use")
    result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": "no data", "is_error": True}
    turns = ask + [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    server.message(messages=turns, tools=[ANTHROPIC_TOOL])
    server.message(**fields | {"tool_choice": {"type": "tool", "name": "weather"}})
    none = server.message(**fields | {"tool_choice": {"type": "none"}})
    assert none.stop_reason != "tool_use"


def check_thinking(server):
    """Checks that reasoning is a thinking block, which the next request may contain."""
    fields = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    message = server.message(**fields)
    equal((message.content[0].type, message.content[0].signature), ("thinking", ""))
    ask = [{"role": "user", "content": "Hello"}]
    with server.stream(**fields) as stream:
        streamed = stream.get_final_message()
    equal(streamed.content[0].thinking, message.content[0].thinking)
    assert message.usage.output_tokens_details.thinking_tokens > 0
    turns = ask + [{"role": "assistant", "content": message.content}, {"role": "user", "content": "More"}]
    server.message(messages=turns)


def check_message_errors(server):
    """Checks that errors have Anthropic's form and types."""
    bad = anthropic.BadRequestError

    def kind(error):
        equal(error.body["type"], "error")
        assert error.request_id
        return error.body["error"]["type"]

    equal(kind(refused(bad, lambda: server.message(messages=[]))), "invalid_request_error")
    error = refused(bad, lambda: server.message(tools=[{"type": "web_search_20250305", "name": "web_search"}]))
    assert "tools[0].type" in error.body["error"]["message"]
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
    refused(bad, lambda: server.message(messages=[{"role": "user", "content": [image]}]))
    refused(bad, lambda: server.message(max_tokens=0))
    refused(bad, lambda: server.message(messages=[{"role": "user", "content": "long " * 100_000}]))
    equal(kind(refused(anthropic.NotFoundError, lambda: server.message(model="missing"))), "not_found_error")
    client = server.anthropic
    unknown = refused(anthropic.NotFoundError, lambda: client.post("/v1/messages/other", cast_to=object, body={}))
    equal(kind(unknown), "not_found_error")
    method = refused(anthropic.APIStatusError, lambda: client.get("/v1/messages", cast_to=object))
    equal((method.status_code, kind(method)), (405, "invalid_request_error"))
    refused(bad, lambda: client.post("/v1/messages", cast_to=object, body={"model": server.model}))
    late = {"extra_headers": {"x-iec-deadline-ms": "1"}, "max_tokens": 400}
    equal(kind(refused(anthropic.APIStatusError, lambda: server.message(**late))), "timeout_error")
    refused(anthropic.APIStatusError, lambda: list(server.message(stream=True, **late)))
    # The server answers before it has read the body.
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc)
    connection.request("POST", "/v1/messages", headers={"x-api-key": client.api_key, "content-length": str(9 << 20)})
    large = connection.getresponse()
    equal((large.status, json.load(large)["error"]["type"]), (413, "request_too_large"))


CHECKS = [
    check_response,
    check_response_stream,
    check_response_format,
    check_response_turns,
    check_response_errors,
    check_message,
    check_count,
    check_stop,
    check_prefill,
    check_message_errors,
]
TOOL_CHECKS = [check_response_tools, check_message_tools]
THINKING_CHECKS = [check_response_reasoning, check_thinking]


def main():
    """Runs all checks that the model allows."""
    server = Server(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none")
    checks = list(CHECKS)
    if not server.template:
        checks = [check_no_template]
    elif "tools" in server.template:
        checks += TOOL_CHECKS
    if server.template and "enable_thinking" in server.template:
        checks += THINKING_CHECKS
    failed = 0
    for check in checks:
        try:
            check(server)
            print(f"passed {check.__name__}")
        except Exception:
            failed += 1
            print(f"FAILED {check.__name__}\n{traceback.format_exc()}")
    print(f"{len(checks) - failed} of {len(checks)} checks passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
