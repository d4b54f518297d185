"""One of the libraries of `agent_clients.py` against a server: agent_program.py PART URL. Prints what was checked."""

import sys
from decimal import Decimal
from typing import Annotated, Literal, Optional

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

ANSWER = "It rains in Norway's capital."
QUESTION = "What is the weather in Oslo?"
# Versions of Pydantic up to 2.12 write such a pattern, whose look-ahead cannot be enforced.
PRICE = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": "^(?!^[-+.]*$)[+-]?[0-9]{1,3}(?:\\.[0-9])?$"}]}


class Person(BaseModel):
    """A person, with what generators of schemas write: a set, a decimal number, an optional field, a choice."""

    model_config = ConfigDict(extra="forbid")
    name: Literal["Ann", "Bob"]
    age: int = Field(ge=1, le=99)
    kind: Optional[Literal["a", "b"]] = None
    groups: set[Literal[1, 2]] = Field(max_length=2)
    price: Annotated[Decimal, WithJsonSchema(PRICE)]


class Choice(BaseModel):
    """A choice, closed: without `strict`, a schema allows further fields, and a model of stories always has more."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


def instructor(url):
    import instructor
    import openai

    api = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    # The mode JSON sends the schema as text only, which a model of stories does not follow.
    modes = ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"]
    done = []
    for name in modes:
        mode = getattr(instructor.Mode, name, None)
        if mode is None:
            continue
        client = instructor.from_openai(api, mode=mode)
        ask = {"model": "story", "response_model": Choice, "max_retries": 0}
        for text in ("Once upon a time", "One day", "Lily and Ben"):
            prompt = [{"role": "user", "content": text}]
            if name == "RESPONSES_TOOLS":
                found = client.responses.create(input=text, max_output_tokens=400, **ask)
            else:
                found = client.chat.completions.create(messages=prompt, max_tokens=400, temperature=0, **ask)
            assert isinstance(found, Choice), found
        done.append(name)
    client = instructor.from_openai(api, mode=instructor.Mode.TOOLS)
    ask = {"model": "story", "messages": [{"role": "user", "content": "One day"}], "max_tokens": 800, "temperature": 0}
    assert client.chat.completions.create(response_model=Person, max_retries=2, **ask).age
    return f"modes {', '.join(done)}; a set, a decimal number and optional fields"


def agents_sdk(url):
    from agents import Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    api = AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
    calls = []

    @function_tool
    def get_weather(city: str) -> str:
        """Tells the weather."""
        calls.append(city)
        return "rain"

    for model in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        agent = Agent(
            name="weather", instructions="Be brief.", tools=[get_weather], model=model(model="weather", openai_client=api)
        )
        found = Runner.run_sync(agent, QUESTION)
        assert found.final_output == ANSWER, found.final_output
        handed = Agent(name="first", instructions="Hand over.", tools=[get_weather], model=agent.model, handoffs=[agent])
        assert Runner.run_sync(handed, QUESTION).final_output == ANSWER
    assert calls == ["Oslo"] * 4, calls
    return "an agent with a function, by chat completions and by responses, and with a handoff"


def langgraph(url):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    calls = []

    @tool
    def get_weather(city: str) -> str:
        """Tells the weather."""
        calls.append(city)
        return "rain"

    for responses in (False, True):
        model = ChatOpenAI(
            model="weather", base_url=url + "/v1", api_key="none", temperature=0, max_retries=0, use_responses_api=responses
        )
        agent = create_react_agent(model, [get_weather])
        found = agent.invoke({"messages": [("user", QUESTION)]})
        text = found["messages"][-1].text
        text = text() if callable(text) and not isinstance(text, str) else text
        assert text == ANSWER, found
    assert calls == ["Oslo"] * 2, calls
    streamed = "".join(piece.text if isinstance(piece.text, str) else piece.text() for piece in model.stream("Tell me"))
    assert streamed == ANSWER, streamed
    story = ChatOpenAI(model="story", base_url=url + "/v1", api_key="none", temperature=0, max_retries=0, max_tokens=400)
    assert isinstance(story.with_structured_output(Choice).invoke("Once"), Choice)
    return "an agent by chat completions and by responses, a stream, structured output"


if __name__ == "__main__":
    part, url = sys.argv[1:]
    print({"instructor": instructor, "agents-sdk": agents_sdk, "langgraph": langgraph}[part](url))
