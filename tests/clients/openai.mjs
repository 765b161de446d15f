// What OpenAI's client for Node gets from a server: `node openai.mjs URL MODEL` prints it as JSON.
import OpenAI from "openai";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "x", maxRetries: 0 });
const messages = [{ role: "user", content: "Name the capital of France." }];
const asked = { model, messages, temperature: 0, max_tokens: 12 };
const said = {};

async function streamed(body) {
  const options = { stream: true, stream_options: { include_usage: true } };
  const chunks = [];
  for await (const chunk of await client.chat.completions.create({ ...body, ...options })) {
    chunks.push(chunk);
  }
  return chunks;
}

said.models = (await client.models.list()).data.map((entry) => entry.id);
said.model = (await client.models.retrieve(model)).id;
said.chat = await client.chat.completions.create(asked);
said.chunks = await streamed(asked);
said.choices = await client.chat.completions.create({
  ...asked, n: 2, seed: 7, temperature: 1, logprobs: true, top_logprobs: 3,
});
said.stopped = await client.chat.completions.create({ ...asked, max_tokens: 30, stop: ["Paris"] });
said.biased = await client.chat.completions.create({
  ...asked, max_tokens: 3, logit_bias: { 260: 100 }, presence_penalty: 0, frequency_penalty: 0,
});
said.penalised = await client.chat.completions.create({
  ...asked, max_tokens: 40, frequency_penalty: 2, presence_penalty: 2,
});
said.json = await client.chat.completions.create({
  ...asked,
  max_tokens: 60,
  response_format: {
    type: "json_schema",
    json_schema: {
      name: "place",
      strict: true,
      schema: {
        type: "object",
        properties: { city: { type: "string", maxLength: 20 }, large: { type: "boolean" } },
        required: ["city", "large"],
        additionalProperties: false,
      },
    },
  },
});
const tools = [{
  type: "function",
  function: {
    name: "weather",
    description: "The weather in a city.",
    parameters: {
      type: "object",
      properties: { city: { type: "string", maxLength: 20 } },
      required: ["city"],
      additionalProperties: false,
    },
  },
}];
const calling = { ...asked, max_tokens: 80, tools, tool_choice: "required" };
said.tools = await client.chat.completions.create(calling);
said.toolChunks = await streamed(calling);
said.completions = await client.completions.create({
  model, prompt: ["One, two,", "Red, green,"], max_tokens: 4, temperature: 0, n: 1, echo: true,
  logprobs: 2,
});
said.fromTokens = await client.completions.create({
  model, prompt: [1, 338, 260], max_tokens: 2, temperature: 0,
});
said.embedding = (
  await client.embeddings.create({ model, input: ["Paris", "Rome"], encoding_format: "float" })
).data.map((entry) => entry.embedding.length);
const response = await client.responses.create({
  model, input: "Name the capital of France.", max_output_tokens: 12, temperature: 0,
});
said.response = response.output_text;
said.error = await client.chat.completions
  .create({ ...asked, temperature: 9 })
  .catch((error) => ({ status: error.status, param: error.param }));
console.log(JSON.stringify(said));
