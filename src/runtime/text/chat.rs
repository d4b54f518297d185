//! Chat templates: render a conversation as a prompt with the model's own Jinja template (`chat_template.jinja`, or
//! `chat_template` in `tokenizer_config.json`) as `transformers` does: with trimmed blocks, `tojson` in the format of
//! Python, `raise_exception` and `strftime_now`.
//!
//! A template is an untrusted program. It can access nothing but its arguments. Its steps, its nesting, and the text
//! and lists that it makes are bounded, but not strictly: the engine counts some texts only when they are made.
//! Therefore a [`ChatTemplate`] is only data until [`ChatTemplate::render`] compiles and runs it, and `iec` does that
//! in a separate process with limited memory and time (`src/session/template.rs`).

use super::datetime::strftime_now;
use super::message::{Message, View};
use crate::error::{Context, Error, Result};
use crate::files;
use crate::iebin::JSON_NAME;
use crate::output::swap;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value};
use minijinja::{Environment, ErrorKind, State};
use minijinja_contrib::pycompat::unknown_method_callback;
use regex::{Captures, Regex};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};

/// File name of a chat template alone.
pub const TEMPLATE_NAME: &str = "chat_template.jinja";
/// File name of the tokenizer's configuration, which holds the special tokens and may hold the template.
pub const CONFIG_NAME: &str = "tokenizer_config.json";

/// Largest number of steps per rendering. An instruction is a step, and so are 64 bytes of text that are made or
/// written, and two elements of a list: this bounds memory at about 128 MB. The largest known template needs some
/// thousands of steps for a long conversation.
const STEPS: u64 = 2_000_000;
/// Bytes that a value takes as text for each step: lists within lists become text slowly.
const BYTES_PER_STEP: usize = 4;
/// Parts of a text for each step: a part takes up to 100 bytes.
const PARTS_PER_STEP: u64 = 2;
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
        let tool_use = named("tool_use").filter(|_| own.is_none());
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
        check_variables(&options.variables)?;
        if options.tools.is_some() && !self.reads_tools() {
            return Err(Error::unsupported("the chat template has no place for tools")
                .at(&self.path)
                .help("leave the tools out, or use a model whose template renders them"));
        }
        let source = if options.tools.is_some() { self.tool_source() } else { &self.source };
        let mut environment = environment();
        environment.set_fuel(Some(steps));
        let source = plain_blocks(source);
        let mut prompt = Prompt { text: Vec::new(), longest };
        let context = self.context(messages, options);
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
fn check_variables(variables: &Variables) -> Result<()> {
    match variables.keys().find(|name| RESERVED.contains(&name.as_str())) {
        Some(name) => {
            let found = format!("found `{name}` among the variables of the chat template, which sets it");
            Err(Error::usage(found))
        }
        None => Ok(()),
    }
}

/// Cuts a prompt behind the content of its last message. Templates may have removed the space around the content.
fn continued(mut prompt: String, content: &str) -> Result<String> {
    let trimmed = content.trim();
    match prompt.rfind(trimmed).filter(|_| !trimmed.is_empty()) {
        Some(at) => {
            let kept = content.trim_start();
            let kept = if prompt[at..].starts_with(kept) { kept } else { trimmed };
            prompt.truncate(at + kept.len());
            Ok(prompt)
        }
        None => {
            Err(Error::usage("the prompt does not contain the content of the last message, which should be continued")
                .help("leave `continue_final_message` out, or give the last message a text"))
        }
    }
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

/// Creates the environment with the filters, tests and functions that templates may use.
fn environment() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the usual delimiters"));
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", tojson);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("split", |state: &State, text: &Value, separator: Option<Arc<str>>, most: Option<i64>| {
        count_parts(state, text, separator.as_deref())?;
        minijinja::filters::split(text, separator, most)
    });
    environment.add_filter("lines", |state: &State, text: &Value| {
        count_parts(state, text, Some("\n"))?;
        minijinja::filters::lines(text)
    });
    // In minijinja `none is iterable` is true, in Jinja2 it is false, and templates test `tools is iterable`.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    environment.add_function("raise_exception", |message: String| -> std::result::Result<Value, minijinja::Error> {
        Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
    });
    environment.add_function("strftime_now", |state: &State, format: String| {
        state.consume_fuel(format.len() as u64)?;
        strftime_now(&format).map_err(|why| minijinja::Error::new(ErrorKind::InvalidOperation, why))
    });
    environment
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
    serde_json::from_str(&text).map_err(|e| Error::corrupt(format!("not JSON: {e}"))).at(path)
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

/// Matches the tags `{% generation %}` and `{% endgeneration %}`, between which templates put the text that a model is
/// trained on.
static GENERATION: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}").expect("a constant pattern"));

/// Matches expressions and statements; comments match, too, without a group.
static TAG: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r"(?s)\{#.*?#\}|\{[{%](.*?)[%}]\}").expect("a constant pattern"));
/// Matches strings in expressions.
static STRING: LazyLock<Regex> =
    LazyLock::new(|| Regex::new(r#"(?s)'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*""#).expect("a constant pattern"));
/// Matches the variable `tools`.
static TOOLS: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"(?:^|[^\w.])tools\b").expect("a constant pattern"));

/// Replaces the tags of [`GENERATION`], which minijinja does not know, by an `if` block that is always true and so
/// renders the same text.
fn plain_blocks(source: &str) -> Cow<'_, str> {
    GENERATION.replace_all(source, |tag: &Captures| {
        let statement = if tag.get(2).is_some() { "endif" } else { "if true" };
        format!("{{%{} {statement} {}%}}", &tag[1], &tag[3])
    })
}

/// Returns the length of a value; as in Jinja, an undefined value has length 0.
fn length(value: &Value) -> std::result::Result<usize, minijinja::Error> {
    match value.len() {
        Some(length) => Ok(length),
        None if value.is_undefined() => Ok(0),
        None => {
            let found = format!("a value of type {} has no length", value.kind());
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, found))
        }
    }
}

/// Counts the parts into which a text will be split as steps. The engine counts the list of them only when it is made,
/// and a list takes many times the memory of its text.
fn count_parts(state: &State, text: &Value, separator: Option<&str>) -> std::result::Result<(), minijinja::Error> {
    let Some(text) = text.as_str() else { return Ok(()) };
    let parts = match separator {
        None => text.split_whitespace().count(),
        Some(separator) => text.matches(separator).count(),
    };
    state.consume_fuel(parts as u64 / PARTS_PER_STEP)
}

/// Calls a method as in Python. The engine counts only the result of a method as steps, so the methods that make much
/// text or long lists of small arguments are counted here before they are called.
fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    arguments: &[Value],
) -> std::result::Result<Value, minijinja::Error> {
    if let (Some(text), "join" | "format") = (value.as_str(), name) {
        let mut out = Counted { text: Vec::new(), state };
        // A write error means too many steps, which the next line reports.
        let _ = arguments.iter().try_for_each(|argument| write!(out, "{argument}"));
        let fields = text.split('{').skip(1).filter_map(|field| field.split('}').next());
        let numbers = fields.flat_map(|field| field.split(|c: char| !c.is_ascii_digit()).filter(|n| !n.is_empty()));
        let widths = numbers.map(|n| n.parse().unwrap_or(STEPS)).fold(0, u64::saturating_add);
        state.consume_fuel(if name == "format" { widths } else { 0 })?;
    }
    match name {
        "split" => count_parts(state, value, arguments.first().and_then(Value::as_str))?,
        "splitlines" => count_parts(state, value, Some("\n"))?,
        _ => {}
    }
    unknown_method_callback(state, value, name, arguments)
}

/// Formats a value like Python's `json.dumps(value, ensure_ascii=False, indent=…)`: a space after `,` and `:`, and no
/// escapes for HTML.
fn tojson(state: &State, value: &Value, options: Kwargs) -> std::result::Result<Value, minijinja::Error> {
    let failed =
        |e: serde_json::Error| minijinja::Error::new(ErrorKind::InvalidOperation, format!("tojson fails, {e}"));
    let indent: Option<usize> = options.get("indent")?;
    // These options are accepted and ignored: templates pass them only with values that ask for what this function does
    // anyway.
    let _: (Option<bool>, Option<bool>) = (options.get("ensure_ascii")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    let mut out = Counted { text: Vec::new(), state };
    let written = match indent {
        Some(width) if width <= 16 => {
            let spaces = vec![b' '; width];
            let pretty = serde_json::ser::PrettyFormatter::with_indent(&spaces);
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, pretty))
        }
        Some(width) => {
            let found = format!("found an indent of {width} for tojson, expected at most 16");
            return Err(minijinja::Error::new(ErrorKind::InvalidOperation, found));
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Spaced)),
    };
    // An error because of too many steps takes precedence over the write error that it caused.
    state.consume_fuel(0)?;
    written.map_err(failed)?;
    Ok(Value::from_safe_string(String::from_utf8_lossy(&out.text).into_owned()))
}

/// Text of a value, which counts as steps while it grows: a list that contains others many times is much longer as
/// text.
struct Counted<'a> {
    text: Vec<u8>,
    state: &'a State<'a, 'a>,
}

impl Write for Counted<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let before = self.text.len() / BYTES_PER_STEP;
        let steps = (self.text.len() + bytes.len()) / BYTES_PER_STEP - before;
        self.state.consume_fuel(steps as u64).map_err(std::io::Error::other)?;
        self.text.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// JSON formatter that writes one line with Python's separators.
struct Spaced;

impl serde_json::ser::Formatter for Spaced {
    fn begin_array_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_key<W: ?Sized + std::io::Write>(&mut self, out: &mut W, first: bool) -> std::io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }
    fn begin_object_value<W: ?Sized + std::io::Write>(&mut self, out: &mut W) -> std::io::Result<()> {
        out.write_all(b": ")
    }
}

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
        let call =
            Message { tool_calls: vec![ToolCall::new("c1", "f", r#"{"a": [1]}"#)], ..Message::new("assistant", "") };
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
        for (source, content) in [("{{ messages[0].content }}", "It is"), (kept, " ")] {
            assert!(prompt(source, content).unwrap_err().to_string().contains("last message"), "{source}");
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
