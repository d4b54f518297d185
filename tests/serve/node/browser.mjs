// Runs in a page of another origin: the official OpenAI library with all the headers that it sends.
import OpenAI from "openai";

window.check = async (url) => {
  const api = new OpenAI({ baseURL: url + "/v1", apiKey: "none", dangerouslyAllowBrowser: true, maxRetries: 0 });
  const models = (await api.models.list()).data.map((model) => model.id);
  const ask = { model: "weather", messages: [{ role: "user", content: "Tell me" }], temperature: 0 };
  const whole = (await api.chat.completions.create(ask)).choices[0].message.content;
  let streamed = "";
  for await (const chunk of await api.chat.completions.create({ ...ask, stream: true })) streamed += chunk.choices[0]?.delta?.content ?? "";
  const response = (await api.responses.create({ model: "weather", input: "Tell me", temperature: 0 })).output_text;
  let refused = "";
  try {
    await api.chat.completions.create({ ...ask, model: "absent" });
  } catch (error) {
    refused = `${error.status}`;
  }
  return { models, whole, streamed, response, refused };
};
