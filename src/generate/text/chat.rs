//! Chat templates: render a conversation as a prompt with the model's own Jinja template (`chat_template.jinja`, or
//! `chat_template` in `tokenizer_config.json`) as `transformers` does: with trimmed blocks, `tojson` in the format of
//! Python, `raise_exception` and `strftime_now`.
//!
//! A template is an untrusted program. It can access nothing but its arguments. Its steps, its nesting, and the text
//! and lists that it makes are bounded, but not strictly: the engine counts some texts only when they are made.
//! Therefore a [`ChatTemplate`] is only data until [`ChatTemplate::render`] compiles and runs it, and `iec` does that
//! in a separate process with limited memory and time (`src/session/template.rs`).

use super::jinja::{environment, plain_blocks};
use super::message::{Message, View, known_roles};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::{JSON_NAME, TOOL_TEMPLATE_NAME, TOOL_TEMPLATE_SOURCE};
use crate::output::swap;
use crate::strict_json;
use minijinja::ErrorKind;
use minijinja::value::{Serde, Value};
use regex::Regex;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

/// File name of a chat template alone.
pub const TEMPLATE_NAME: &str = "chat_template.jinja";
/// File name of the tokenizer's configuration, which holds the special tokens and may hold the template.
pub const CONFIG_NAME: &str = "tokenizer_config.json";

/// Largest number of steps per rendering. An instruction is a step, and so are 64 bytes of text that are made or
/// written, and two elements of a list: this bounds memory at about 128 MB. The largest known template needs some
/// thousands of steps for a long conversation.
pub(super) const STEPS: u64 = 2_000_000;
/// Largest size of a template or configuration file in bytes; real ones are below 1 MB.
const FILE_LIMIT: u64 = 64 << 20;
/// Special tokens that templates may refer to.
const TOKENS: [&str; 6] = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token"];

/// A chat template with the special tokens that it may refer to.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ChatTemplate {
    source: String,
    /// Template that renders conversations with tools, in place of `source`.
    #[serde(default)]
    tool_use: Option<String>,
    tokens: Vec<(String, String)>,
    path: PathBuf,
    /// Values of further variables, such as `enable_thinking`.
    #[serde(default)]
    variables: Variables,
}

/// Variables of a template with their values, the `chat_template_kwargs` of servers.
pub type Variables = serde_json::Map<String, serde_json::Value>;

/// Options of a rendering.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RenderOptions {
    /// Tools that the model may call: an array of OpenAI's definitions.
    pub tools: Option<serde_json::Value>,
    /// End of the prompt.
    pub ending: Ending,
    /// Variables over those of the template.
    pub variables: Variables,
}

/// End of a prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// The beginning of an answer of the assistant follows the last message (`add_generation_prompt`).
    #[default]
    GenerationPrompt,
    /// Nothing follows the last message.
    Plain,
    /// The prompt ends directly behind the content of the last message, which the model continues
    /// (`continue_final_message`).
    ContinueFinal,
}

/// Variables of a template that have other sources.
const RESERVED: [&str; 4] = ["messages", "tools", "documents", "add_generation_prompt"];

impl ChatTemplate {
    /// Reads the template of a directory with a checkpoint or a pack.
    ///
    /// # Errors
    /// There is no template, or its file cannot be read; the message names the file.
    pub fn open(dir: &Path) -> Result<ChatTemplate> {
        let config_path = member(dir, CONFIG_NAME);
        let config = read_config(&config_path)?;
        let own_path = member(dir, TEMPLATE_NAME);
        let own = read_text(&own_path)?;
        let named = |name| named_template(&config["chat_template"], name);
        let file = [member(dir, TOOL_TEMPLATE_NAME), dir.join(TOOL_TEMPLATE_SOURCE)];
        let file = file.iter().find_map(|path| read_text(path).transpose()).transpose()?;
        let tool_use = file.or_else(|| named("tool_use").filter(|_| own.is_none()));
        let (source, path) = match (own, config["chat_template"].as_str().map(String::from).or(named("default"))) {
            (Some(source), _) => (source, own_path),
            (None, Some(source)) => (source, config_path),
            (None, None) => {
                return Err(Error::unsupported(format!(
                    "found no {TEMPLATE_NAME}, and no `chat_template` in {CONFIG_NAME}"
                ))
                .at(dir)
                .help(
                    "use --prompt for a model without a chat template, or put chat_template.jinja into the directory",
                ));
            }
        };
        Ok(ChatTemplate { source, tool_use, tokens: special_tokens(&config), path, variables: Variables::new() })
    }

    /// Creates a template from a source that does not come from `dir`, with the special tokens that the configuration
    /// in `dir` names; `path` is used in messages.
    ///
    /// # Errors
    /// The configuration cannot be read.
    pub fn with_source(dir: &Path, source: String, path: &Path) -> Result<ChatTemplate> {
        let config = read_config(&member(dir, CONFIG_NAME))?;
        Ok(ChatTemplate {
            source,
            tool_use: None,
            tokens: special_tokens(&config),
            path: path.to_path_buf(),
            variables: Variables::new(),
        })
    }

    /// Reads the template of a file, with the special tokens that the configuration in `dir` names.
    ///
    /// # Errors
    /// The file or the configuration cannot be read.
    pub fn from_file(dir: &Path, path: &Path) -> Result<ChatTemplate> {
        let source = files::utf8(files::read_limited(path, FILE_LIMIT)?).at(path)?;
        ChatTemplate::with_source(dir, source, path)
    }

    /// Creates a template from its source, without a file.
    pub fn from_source(source: &str) -> ChatTemplate {
        ChatTemplate {
            source: source.into(),
            tool_use: None,
            tokens: Vec::new(),
            path: TEMPLATE_NAME.into(),
            variables: Variables::new(),
        }
    }

    /// Sets variables that the template may read, such as `enable_thinking`; a template ignores those that it does not
    /// read. Variables that were set before keep their values unless `variables` names them.
    ///
    /// # Errors
    /// A variable has another source: `messages`, `tools`, `documents` or `add_generation_prompt`.
    pub fn with_variables(mut self, variables: Variables) -> Result<ChatTemplate> {
        check_variables(&variables)?;
        self.variables.extend(variables);
        Ok(self)
    }

    /// Returns the text of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the path of the file that the template was read from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the spelling of the token that ends a turn, if the configuration has one.
    pub fn eos_token(&self) -> Option<&str> {
        self.tokens.iter().find(|(name, _)| name == "eos_token").map(|(_, text)| text.as_str())
    }

    /// Returns the source that renders conversations with tools.
    pub fn tool_source(&self) -> &str {
        self.tool_use.as_deref().unwrap_or(&self.source)
    }

    /// Returns true if the template for tools reads the variable `tools`, as far as its source shows that.
    pub fn reads_tools(&self) -> bool {
        TAG.captures_iter(self.tool_source()).any(|tag| {
            let words = STRING.replace_all(tag.get(1).map_or("", |inside| inside.as_str()), "''");
            TOOLS.is_match(&words)
        })
    }

    /// Renders the prompt for the next assistant turn, of at most `longest` bytes. The prompt contains special tokens
    /// as text: encode it with [`encode_plain`](super::Tokenizer::encode_plain).
    ///
    /// # Errors
    /// The template is invalid, rejects the conversation, fails, runs too long, or makes a longer prompt.
    pub fn render(&self, messages: &[Message], longest: usize) -> Result<String> {
        self.render_with(messages, &RenderOptions::default(), longest)
    }

    /// Renders a prompt as [`render`](ChatTemplate::render) does, with tools, variables and another ending.
    ///
    /// # Errors
    /// The errors of [`render`](ChatTemplate::render); there are tools and the template does not read them; a variable
    /// has another source; or the content of the last message, which the model should continue, is not in the prompt.
    pub fn render_with(&self, messages: &[Message], options: &RenderOptions, longest: usize) -> Result<String> {
        self.render_within(messages, options, longest, STEPS)
    }

    /// Renders a prompt as [`render_with`](ChatTemplate::render_with) does, with another limit of steps. Memory and
    /// time are proportional to the steps.
    ///
    /// # Errors
    /// The same as those of [`render_with`](ChatTemplate::render_with).
    pub fn render_within(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        longest: usize,
        steps: u64,
    ) -> Result<String> {
        self.render_at(messages, options, longest, steps, super::datetime::now())
    }

    /// Renders a prompt as [`render_within`](ChatTemplate::render_within) does, at a time in seconds since 1970.
    pub(super) fn render_at(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        longest: usize,
        steps: u64,
        now: u64,
    ) -> Result<String> {
        check_variables(&options.variables)?;
        if options.tools.is_some() && !self.reads_tools() {
            return Err(Error::unsupported("the chat template has no place for tools")
                .at(&self.path)
                .help("leave the tools out, or use a model whose template renders them"));
        }
        let source = if options.tools.is_some() { self.tool_source() } else { &self.source };
        let mut environment = environment(now);
        environment.set_fuel(Some(steps));
        let messages = &known_roles(messages, source)[..];
        let source = plain_blocks(source);
        let mut prompt = Prompt { text: Vec::new(), longest };
        let continued_messages = match options.ending {
            Ending::ContinueFinal => Some(marked(messages, &source).at(&self.path)?),
            _ => None,
        };
        let context = self.context(continued_messages.as_deref().unwrap_or(messages), options);
        let render = || environment.template_from_named_str("chat", &source)?.render_captured_to(context, &mut prompt);
        render().map_err(|e| template_error(&e, longest, steps)).at(&self.path)?;
        let text = String::from_utf8(prompt.text)
            .map_err(|e| Error::corrupt(format!("the chat template: {e}")).at(&self.path))?;
        match (options.ending, messages.last()) {
            (Ending::ContinueFinal, Some(last)) => continued(text, &last.content).at(&self.path),
            _ => Ok(text),
        }
    }

    /// Returns the variables of a rendering.
    fn context(&self, messages: &[Message], options: &RenderOptions) -> Value {
        let mut context: Vec<(&str, Value)> =
            self.tokens.iter().map(|(name, text)| (name.as_str(), Value::from(text.as_str()))).collect();
        let variables = self.variables.iter().chain(&options.variables);
        context.extend(variables.map(|(name, value)| (name.as_str(), Value::from(Serde(value)))));
        let views: Vec<View<'_>> = messages.iter().map(View::new).collect();
        context.push(("messages", Value::from(Serde(&views))));
        // `transformers` always passes `tools` and `documents`, and templates test whether they are none.
        let tools = options.tools.as_ref().map_or(Value::from(()), |tools| Value::from(Serde(tools)));
        context.extend([("tools", tools), ("documents", Value::from(()))]);
        context.push(("add_generation_prompt", Value::from(options.ending == Ending::GenerationPrompt)));
        Value::from_pairs(context)
    }
}

/// Refuses variables that have other sources.
///
/// # Errors
/// One is `messages`, `tools`, `documents` or `add_generation_prompt`.
pub fn check_variables(variables: &Variables) -> Result<()> {
    match variables.keys().find(|name| RESERVED.contains(&name.as_str())) {
        Some(name) => {
            let found = format!("found `{name}` among the variables of the chat template, which sets it");
            Err(Error::usage(found))
        }
        None => Ok(()),
    }
}

/// Mark behind the content of the message that is continued. It ends in a space, so that it shows whether the template
/// removes the space around contents.
const MARK: &str = "IEC_CONTINUES_HERE ";

/// Returns the messages with [`MARK`] behind the content of the last one.
fn marked(messages: &[Message], source: &str) -> Result<Vec<Message>> {
    let mut messages = messages.to_vec();
    match messages.last_mut().filter(|_| source.contains("content")) {
        Some(last) => last.content.push_str(MARK),
        None => return Err(not_continued()),
    }
    Ok(messages)
}

/// Cuts a prompt at [`MARK`]. If the template has removed the space around the content, that before the mark is removed
/// too, as in `transformers`.
fn continued(mut prompt: String, content: &str) -> Result<String> {
    let at = prompt.rfind(MARK.trim_end()).filter(|_| prompt.contains(content.trim())).ok_or_else(not_continued)?;
    let is_kept = prompt[at..].starts_with(MARK);
    prompt.truncate(at);
    if !is_kept {
        prompt.truncate(prompt.trim_end().len());
    }
    Ok(prompt)
}

fn not_continued() -> Error {
    Error::usage("the prompt does not contain the content of the last message, which should be continued")
        .help("leave `continue_final_message` out, or use a model whose template renders the message as it is")
}

/// Output of a template, of limited length.
struct Prompt {
    text: Vec<u8>,
    longest: usize,
}

impl Write for Prompt {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.text.len() + bytes.len() > self.longest {
            return Err(std::io::ErrorKind::FileTooLarge.into());
        }
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn template_error(error: &minijinja::Error, longest: usize, steps: u64) -> Error {
    let line = error.line().map_or(String::new(), |line| format!(" (line {line})"));
    match error.kind() {
        ErrorKind::OutOfFuel => Error::corrupt(format!(
            "the chat template takes more than {steps} steps, among them the making of long texts and lists{line}"
        )),
        ErrorKind::WriteFailure => Error::corrupt(format!(
            "the chat template makes a prompt of more than {longest} bytes, the limit for the context"
        )),
        _ => Error::corrupt(format!("chat template: {}{line}", error.detail().unwrap_or(&error.to_string()))),
    }
}

/// Returns the path of a file of the pack or checkpoint in `dir`.
fn member(dir: &Path, name: &str) -> PathBuf {
    swap::member(&dir.join(JSON_NAME), name)
}

/// Reads the configuration of the tokenizer; null if there is none.
fn read_config(path: &Path) -> Result<serde_json::Value> {
    let Some(text) = read_text(path)? else { return Ok(serde_json::Value::Null) };
    serde_json::from_slice(&strict_json::from_python(text.as_bytes()))
        .map_err(|e| Error::corrupt(format!("not JSON: {e}")))
        .at(path)
}

/// Returns the names and spellings of the special tokens of a configuration.
fn special_tokens(config: &serde_json::Value) -> Vec<(String, String)> {
    TOKENS.iter().filter_map(|name| Some((name.to_string(), token_text(&config[*name])?))).collect()
}

/// Reads a UTF-8 file; returns `None` if there is no such file.
fn read_text(path: &Path) -> Result<Option<String>> {
    if !files::exists(path)? {
        return Ok(None);
    }
    files::utf8(files::read_limited(path, FILE_LIMIT)?).at(path).map(Some)
}

/// Returns the source of a template in a list of `{name, template}`.
fn named_template(value: &serde_json::Value, name: &str) -> Option<String> {
    let entry = value.as_array()?.iter().find(|entry| entry["name"] == name)?;
    entry["template"].as_str().map(str::to_string)
}

/// Returns the spelling of a token, given as a string or as an object with `content`.
fn token_text(value: &serde_json::Value) -> Option<String> {
    value.as_str().or_else(|| value["content"].as_str()).map(str::to_string)
}

/// Matches expressions and statements; comments match, too, without a group.
static TAG: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?s)\{#.*?#\}|\{[{%](.*?)[%}]\}").expect("a constant pattern"));
/// Matches strings in expressions.
static STRING: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r#"(?s)'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*""#).expect("a constant pattern"));
/// Matches the variable `tools`.
static TOOLS: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"(?:^|[^\w.])tools\b").expect("a constant pattern"));

#[cfg(test)]
mod tests {
    use super::super::message::ToolCall;
    use super::*;

    fn open(files: &[(&str, &str)]) -> Result<ChatTemplate> {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        ChatTemplate::open(dir.path())
    }

    fn render(template: &str) -> Result<String> {
        let config = r#"{"bos_token":{"content":"<s>"},"eos_token":"</s>"}"#;
        let messages = [Message::new("user", "Hi <b>"), Message::new("assistant", "Yes?"), Message::new("user", " é ")];
        open(&[(TEMPLATE_NAME, template), (CONFIG_NAME, config)])?.render(&messages, 1 << 20)
    }

    #[test]
    fn templates_render_as_in_transformers() {
        let cases = [
            (
                "{% for m in messages %}\n    {% if m['role'] == 'user' %}\n{{ bos_token + m.content.strip() }}\n\
                 {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}A:{% endif %}",
                "<s>Hi <b>\n<s>é\nA:",
            ),
            ("{{ messages[0] | tojson }}", r#"{"role": "user", "content": "Hi <b>"}"#),
            ("{{ [1, 'é'] | tojson(indent=2) }}", "[\n  1,\n  \"é\"\n]"),
            ("{%- generation %}{{ eos_token }}{% endgeneration -%}\n x", "</s>x"),
            (
                "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
                "3",
            ),
            (
                "{% for m in messages %}{% if loop.last %}{{ m.role }}{% else %}{% continue %}{% endif %}{% endfor %}",
                "user",
            ),
            ("{{ messages[1:]|length }}{{ none is none }}{{ x is defined }}", "2TrueFalse"),
            ("{{ tools is iterable }}{{ tools is none }}{{ undefined_name|length }}", "FalseTrue0"),
            ("{% macro f(a) %}[{{ a }}]{% endmacro %}{{ f('x') }}{{ 'a b'.split(' ')[1] }}", "[x]b"),
        ];
        for (template, expected) in cases {
            assert_eq!(render(template).unwrap(), expected, "{template}");
        }
    }

    #[test]
    fn variables_replace_earlier_ones_and_special_tokens_but_no_reserved_name() {
        let of = |json: &str| serde_json::from_str::<Variables>(json).unwrap();
        let source = "{{ bos_token }}{{ messages[0].content }}{{ '-' if enable_thinking == false }}\
                      {{ depth.a | tojson }}";
        let template = open(&[(TEMPLATE_NAME, source), (CONFIG_NAME, r#"{"bos_token": "<s>"}"#)]).unwrap();
        let render = |template: &ChatTemplate| template.render(&[Message::new("user", "x")], 99).unwrap();
        let template = template.with_variables(of(r#"{"enable_thinking": true, "depth": {"a": [1, "b"]}}"#)).unwrap();
        assert_eq!(render(&template), r#"<s>x[1, "b"]"#);
        let template = template.with_variables(of(r#"{"enable_thinking": false, "bos_token": "B"}"#)).unwrap();
        assert_eq!(render(&template), r#"Bx-[1, "b"]"#);
        for name in RESERVED {
            let error = template.clone().with_variables(of(&format!("{{\"{name}\": 1}}"))).unwrap_err();
            assert!(error.to_string().contains(name), "{error}");
        }
    }

    const TOOL: &str = r#"[{"type": "function", "function": {"name": "f"}}]"#;

    fn with_tools() -> RenderOptions {
        RenderOptions { tools: Some(serde_json::from_str(TOOL).unwrap()), ..RenderOptions::default() }
    }

    #[test]
    fn templates_get_tools_calls_and_their_results() {
        let call = Message {
            tool_calls: vec![ToolCall::new("c1", "f", serde_json::json!({"a": [1]}))],
            ..Message::new("assistant", "")
        };
        let result = Message { tool_call_id: Some("c1".into()), name: Some("f".into()), ..Message::new("tool", "7") };
        let source = "{{ tools | tojson }}{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}\
                      {{ c.id }}{{ c.type }}{{ c.function.arguments | tojson }}{{ c.function.arguments is mapping }}\
                      {% endfor %}{% elif m.role == 'tool' %}{{ m.tool_call_id }}{{ m.name }}{{ m.content }}\
                      {% else %}{{ 'tool_calls' in m }}{% endif %}{% endfor %}{{ effort }}{{ add_generation_prompt }}";
        let template = ChatTemplate::from_source(source);
        let variables = serde_json::from_str(r#"{"effort": "low"}"#).unwrap();
        let options = RenderOptions { ending: Ending::Plain, variables, ..with_tools() };
        let text = template.render_with(&[Message::new("user", "x"), call, result], &options, 999).unwrap();
        assert_eq!(text, format!(r#"{TOOL}Falsec1function{{"a": [1]}}Truec1f7lowFalse"#));
        let reserved = serde_json::from_str(r#"{"tools": 1}"#).unwrap();
        let options = RenderOptions { variables: reserved, ..RenderOptions::default() };
        assert!(template.render_with(&[], &options, 999).unwrap_err().to_string().contains("`tools`"));
    }

    #[test]
    fn tools_need_a_place_in_the_template() {
        for (source, reads) in [
            ("{% if tools is not none %}x{% endif %}", true),
            ("{{ tools | tojson }}", true),
            ("{%- for t in tools %}{% endfor %}", true),
            ("no tools", false),
            ("{# {{ tools }} #}{{ 'tools' }}{{ message.tools }}{{ my_tools }}", false),
        ] {
            let template = ChatTemplate::from_source(source);
            assert_eq!(template.reads_tools(), reads, "{source}");
            let error = template.render_with(&[], &with_tools(), 99).err().map(|e| e.to_string());
            assert_eq!(error.is_some_and(|e| e.contains("no place for tools")), !reads, "{source}");
        }
    }

    #[test]
    fn a_continued_prompt_ends_behind_the_last_content() {
        let prompt = |source: &str, content: &str| {
            let options = RenderOptions { ending: Ending::ContinueFinal, ..RenderOptions::default() };
            let messages = [Message::new("user", "The sky"), Message::new("assistant", content)];
            ChatTemplate::from_source(source).render_with(&messages, &options, 999)
        };
        let kept = "{% for m in messages %}<{{ m.content }}>{% endfor %}{{ 'A:' if add_generation_prompt }}";
        let trimmed = "{% for m in messages %}<{{ m.content | trim }}>{% endfor %}";
        assert_eq!(prompt(kept, "The sky").unwrap(), "<The sky><The sky");
        assert_eq!(prompt(kept, " The sky is ").unwrap(), "<The sky>< The sky is ");
        assert_eq!(prompt(trimmed, " The sky is ").unwrap(), "<The sky><The sky is");
        assert_eq!(prompt(kept, " ").unwrap(), "<The sky>< ");
        assert_eq!(prompt(kept, "").unwrap(), "<The sky><");
        for source in ["{{ messages[0].content }}", "none", "{{ messages[1].content[:-5] }}"] {
            assert!(prompt(source, "It is").unwrap_err().to_string().contains("last message"), "{source}");
        }
    }

    #[test]
    fn the_date_can_be_told() {
        let year: u32 = render("{{ strftime_now('%Y') }}").unwrap().parse().unwrap();
        assert!(year >= 2024);
    }

    #[test]
    fn a_template_that_fails_or_never_ends_is_an_error_that_names_the_file() {
        let cases = [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "steps"),
            ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "chat template"),
            ("{% if %}", "line 1"),
            ("{{ messages.x.y }}", "chat template"),
            ("{{ open('/etc/passwd') }}", "chat template"),
        ];
        for (template, expected) in cases {
            let error = render(template).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains(TEMPLATE_NAME), "{template}: {error}");
        }
    }

    #[test]
    fn texts_and_lists_that_grow_without_end_are_too_many_steps() {
        let nested =
            "{% set ns = namespace(l=['x']) %}{% for i in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}";
        let loops = "{% for i in range(99) %}".repeat(3) + &"x".repeat(500) + &"{% endfor %}".repeat(3);
        for template in [
            "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set t %}{{ ns.s }}{{ ns.s }}{% endset %}\
             {% set ns.s = t %}{% endfor %}",
            "{{ ('a' * 90000000) | replace('a', 'b' * 90000000) }}",
            "{{ '{:>999999999}'.format(1) }}",
            "{{ '{:>99999999999999999999999}'.format(1) }}",
            "{{ strftime_now('%A' * 20000000) }}",
            &format!("{{% macro f() %}}{loops}{{% endmacro %}}{{{{ f() }}}}"),
            "{% set x %}{{ 'a' * 9000000 }}{% endset %}{{ x.split('') | length }}",
            "{% set x %}{{ 'a ' * 4500000 }}{% endset %}{{ x.split() | length }}",
            "{{ ('a\n' * 4500000).splitlines() | length }}",
            "{{ ('a\n' * 4500000) | lines | length }}",
            "{{ ('a' * 9000000) | split('') | length }}",
            &format!("{nested}{{{{ ns.l | tojson | length }}}}"),
            &format!("{nested}{{{{ ns.l | tojson(indent=1) | length }}}}"),
            &format!("{nested}{{{{ ','.join([ns.l]) | length }}}}"),
            &format!("{nested}{{{{ '{{}}'.format(ns.l) | length }}}}"),
        ] {
            let error = render(template).unwrap_err().to_string();
            assert!(error.contains("steps"), "{template}: {error}");
        }
        assert_eq!(render("{{ '{:>4}'.format(1) }}{{ ','.join(['a', 'b']) }}").unwrap(), "   1a,b");
        assert_eq!(render("{{ ('a-b-c'|split('-', 1))[1] }}{{ ('a b'|split)[1] }}").unwrap(), "b-cb");
        assert_eq!(render("{{ 'a-b'.split('-')[-1] }}{{ ('a\n1'|lines)[1] }}").unwrap(), "b1");
    }

    #[test]
    fn a_template_is_found_in_its_file_in_the_configuration_or_in_a_list() {
        let user = [Message::new("user", "x")];
        let string = open(&[(CONFIG_NAME, r#"{"chat_template":"S{{ messages[0].content }}"}"#)]).unwrap();
        assert_eq!(string.render(&user, 2).unwrap(), "Sx");
        let list = r#"{"chat_template":[{"name":"tool_use","template":"T"},{"name":"default","template":"D"}]}"#;
        assert_eq!(open(&[(CONFIG_NAME, list)]).unwrap().render(&user, 2).unwrap(), "D");
        assert_eq!(open(&[(CONFIG_NAME, list), (TEMPLATE_NAME, "F")]).unwrap().render(&user, 2).unwrap(), "F");
        let named = list.replace("\"T\"", "\"T{{ tools|length }}\"");
        let template = open(&[(CONFIG_NAME, &named)]).unwrap();
        assert_eq!(template.render_with(&user, &with_tools(), 9).unwrap(), "T1");
        assert_eq!(template.render(&user, 9).unwrap(), "D");
        let missing = open(&[(CONFIG_NAME, "{}")]).unwrap_err();
        assert!(missing.to_string().contains("chat_template") && missing.help_text().is_some());
        assert!(open(&[(CONFIG_NAME, "{")]).unwrap_err().to_string().contains(CONFIG_NAME));
    }
}
