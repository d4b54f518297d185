// Prints the tool lists of public MCP servers as one JSON object: the name of the server, and what `tools/list` returns.
// The servers run as processes of their own; none needs the network to list its tools.
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { StdioClientTransport } from "@modelcontextprotocol/sdk/client/stdio.js";
import path from "node:path";

const bin = (name, ...args) => [path.join(process.cwd(), "node_modules/.bin", name), ...args];
const SERVERS = {
  "brave-search": bin("mcp-server-brave-search"),
  context7: bin("context7-mcp"),
  everything: bin("mcp-server-everything"),
  filesystem: bin("mcp-server-filesystem", process.cwd()),
  github: bin("mcp-server-github"),
  gitlab: bin("mcp-server-gitlab"),
  "google-maps": bin("mcp-server-google-maps"),
  memory: bin("mcp-server-memory"),
  notion: bin("notion-mcp-server"),
  playwright: bin("playwright-mcp", "--headless"),
  "sequential-thinking": bin("mcp-server-sequential-thinking"),
  slack: bin("mcp-server-slack"),
};
// Credentials that the servers want to see before they list their tools.
const NAMES = ["BRAVE_API_KEY", "GITHUB_PERSONAL_ACCESS_TOKEN", "GITLAB_PERSONAL_ACCESS_TOKEN", "GOOGLE_MAPS_API_KEY", "NOTION_TOKEN",
  "SLACK_BOT_TOKEN", "SLACK_TEAM_ID"];
const env = { ...process.env, ...Object.fromEntries(NAMES.map((name) => [name, "none"])) };

const lists = {};
for (const [name, [command, ...args]] of Object.entries(SERVERS)) {
  const client = new Client({ name: "iec", version: "1" });
  try {
    await client.connect(new StdioClientTransport({ command, args, env, stderr: "ignore" }), { timeout: 30000 });
    lists[name] = (await client.listTools()).tools;
  } catch (error) {
    console.error(`${name}: ${error.message}`);
  }
  await client.close();
}
// Servers may leave timers behind; all must be written before the end.
process.stdout.write(JSON.stringify(lists) + "\n", () => process.exit(0));
