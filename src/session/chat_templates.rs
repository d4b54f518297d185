//! Chat templates that are part of the program, for models that come without one.
//!
//! Each is written from the published description of its format. A template of the model itself is used wherever there
//! is one, because two models of a family may differ in details.

use crate::error::{Cause, Error, Result};
use crate::generate::text::ChatTemplate;
use crate::session::Session;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// A built-in chat template.
#[derive(Debug, PartialEq, Eq)]
pub struct BuiltIn {
    /// Name on the command line.
    pub name: &'static str,
    /// Models that use the format.
    pub about: &'static str,
    source: &'static str,
    /// Texts that end an answer. The tokenizer may have them as single tokens.
    ends: &'static [&'static str],
}

/// Defines the row of a template whose file has its name.
macro_rules! row {
    ($name:literal, $about:literal, $ends:expr) => {
        BuiltIn {
            name: $name,
            about: $about,
            source: include_str!(concat!("chat_templates/", $name, ".jinja")),
            ends: $ends,
        }
    };
}

/// All built-in chat templates.
pub const BUILT_IN: &[BuiltIn] = &[
    row!("chatml", "Qwen, Yi, SmolLM, OpenHermes and many fine-tuned models", &["<|im_end|>"]),
    row!("llama2", "Llama 2 Chat, Code Llama Instruct", &[]),
    row!("llama3", "Llama 3 Instruct", &["<|eot_id|>"]),
    row!("mistral", "Mistral Instruct v0.3, Mixtral Instruct", &[]),
    row!("gemma", "Gemma", &["<end_of_turn>"]),
    row!("zephyr", "Zephyr, TinyLlama Chat, StableLM", &[]),
    row!("phi3", "Phi-3", &["<|end|>"]),
    row!("harmony", "gpt-oss", &["<|return|>", "<|call|>"]),
    row!("deepseek", "DeepSeek V3 and R1", &["<｜end▁of▁sentence｜>"]),
    row!("command-r", "Command R", &["<|END_OF_TURN_TOKEN|>"]),
    row!("vicuna", "Vicuna", &["USER:"]),
    row!("alpaca", "Alpaca; also the choice for a base model", &["### Instruction:"]),
];

/// Aliases of built-in templates.
const ALIASES: &[(&str, &str)] =
    &[("gpt-oss", "harmony"), ("llama-2", "llama2"), ("llama-3", "llama3"), ("phi-3", "phi3")];

/// Value of `--chat-template`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum TemplateChoice {
    /// The template of the model.
    #[default]
    Auto,
    /// A built-in template.
    BuiltIn(&'static BuiltIn),
    /// A template in a file.
    File(PathBuf),
}

impl fmt::Display for TemplateChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TemplateChoice::Auto => f.write_str("auto"),
            TemplateChoice::BuiltIn(row) => f.write_str(row.name),
            TemplateChoice::File(path) => path.display().fmt(f),
        }
    }
}

impl FromStr for TemplateChoice {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<TemplateChoice, String> {
        let name = text.to_ascii_lowercase();
        let name = ALIASES.iter().find(|(alias, _)| *alias == name).map_or(name.as_str(), |(_, name)| name);
        match BUILT_IN.iter().find(|row| row.name == name) {
            _ if name == "auto" => Ok(TemplateChoice::Auto),
            Some(row) => Ok(TemplateChoice::BuiltIn(row)),
            None if text.contains(['/', '.']) => Ok(TemplateChoice::File(text.into())),
            None => Err(format!("expected auto, a path with a `/` or a `.`, or one of {}", names())),
        }
    }
}

/// Returns the names of the built-in templates, with commas between.
pub fn names() -> String {
    BUILT_IN.iter().map(|row| row.name).collect::<Vec<_>>().join(", ")
}

/// A template together with the texts that end an answer.
#[derive(Debug, Clone)]
pub struct Template {
    /// Template that renders a conversation.
    pub template: ChatTemplate,
    /// Name shown to the user: the name in the table, or the path of the file.
    pub name: String,
    ends: &'static [&'static str],
}

impl TemplateChoice {
    /// Opens the template for the model of a session.
    ///
    /// # Errors
    /// The model has no template and none is named, or the file cannot be read.
    pub fn open(&self, session: &Session) -> Result<Template> {
        let dir = &session.reader.dir;
        match self {
            TemplateChoice::Auto => {
                let template = session.chat_template().map_err(|e| match e.cause() {
                    Cause::Unsupported(_) => missing(dir),
                    _ => e,
                })?;
                Ok(Template { name: template.path().display().to_string(), template, ends: &[] })
            }
            TemplateChoice::BuiltIn(row) => {
                let path = Path::new("built-in template").join(row.name);
                let template = ChatTemplate::with_source(dir, row.source.into(), &path)?;
                Ok(Template { template, name: row.name.into(), ends: row.ends })
            }
            TemplateChoice::File(path) => {
                let template = ChatTemplate::from_file(dir, path)?;
                Ok(Template { template, name: path.display().to_string(), ends: &[] })
            }
        }
    }
}

impl Template {
    /// Returns the tokens and the texts that end an answer. A text that the tokenizer has as one token is a token.
    ///
    /// # Errors
    /// The pack has no tokenizer.
    pub fn ends(&self, session: &Session) -> Result<(Vec<u32>, Vec<String>)> {
        let tokenizer = session.tokenizer()?;
        let mut tokens = Vec::from_iter(session.end_of_turn(&self.template)?);
        let mut texts = Vec::new();
        for end in self.ends {
            match tokenizer.id(end) {
                Some(id) => tokens.push(id),
                None => texts.push((*end).to_string()),
            }
        }
        Ok((tokens, texts))
    }
}

/// Builds the error for the model in `dir` that has no template; it lists the built-in templates.
pub fn missing(dir: &Path) -> Error {
    Error::unsupported("found no chat template; the model continues texts and may not be trained to answer")
        .at(dir)
        .help(format!(
            "name the format that it was trained with by --chat-template ({}), or continue a text with \
             `iec run --prompt`",
            names()
        ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::generate::text::Message;

    fn rendered(name: &str, roles: &[(&str, &str)]) -> String {
        let TemplateChoice::BuiltIn(row) = name.parse().unwrap() else { panic!("{name}") };
        let dir = tempfile::tempdir().unwrap();
        let config = r#"{"bos_token": "<s>", "eos_token": {"content": "</s>"}}"#;
        std::fs::write(dir.path().join("tokenizer_config.json"), config).unwrap();
        let template = ChatTemplate::with_source(dir.path(), row.source.into(), Path::new(name)).unwrap();
        let messages: Vec<Message> = roles.iter().map(|(role, text)| Message::new(role, *text)).collect();
        template.render(&messages, 1 << 20).unwrap()
    }

    const TALK: [(&str, &str); 4] = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Yes?"), ("user", "1+1?")];

    #[test]
    fn built_in_templates_render_their_published_formats() {
        let cases = [
            (
                "chatml",
                "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n\
                 Yes?<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n",
            ),
            ("llama2", "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST] Yes? </s><s>[INST] 1+1? [/INST]"),
            (
                "llama3",
                "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|><|start_header_id|>user\
                 <|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nYes?<|eot_id|>\
                 <|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|><|start_header_id|>assistant\
                 <|end_header_id|>\n\n",
            ),
            ("mistral", "<s>[INST] Be brief.\n\nHi[/INST] Yes?</s>[INST] 1+1?[/INST]"),
            (
                "gemma",
                "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes?<end_of_turn>\n\
                 <start_of_turn>user\n1+1?<end_of_turn>\n<start_of_turn>model\n",
            ),
            (
                "zephyr",
                "<|system|>\nBe brief.</s>\n<|user|>\nHi</s>\n<|assistant|>\nYes?</s>\n<|user|>\n1+1?</s>\n\
                 <|assistant|>\n",
            ),
            (
                "phi3",
                "<|system|>\nBe brief.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\nYes?<|end|>\n<|user|>\n1+1?<|end|>\n\
                 <|assistant|>\n",
            ),
            ("deepseek", "<s>Be brief.<｜User｜>Hi<｜Assistant｜>Yes?</s><｜User｜>1+1?<｜Assistant｜>"),
            (
                "command-r",
                "<s><|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>Be brief.<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|>\
                 <|USER_TOKEN|>Hi<|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>Yes?\
                 <|END_OF_TURN_TOKEN|><|START_OF_TURN_TOKEN|><|USER_TOKEN|>1+1?<|END_OF_TURN_TOKEN|>\
                 <|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
            ),
            ("vicuna", "<s>Be brief. USER: Hi ASSISTANT: Yes?</s>USER: 1+1? ASSISTANT:"),
            (
                "alpaca",
                "<s>Be brief.\n\n### Instruction:\nHi\n\n### Response:\nYes?\n\n### Instruction:\n1+1?\n\n\
                 ### Response:\n",
            ),
        ];
        for (name, expected) in cases {
            assert_eq!(rendered(name, &TALK), expected, "{name}");
        }
        // The prompt of harmony holds the date.
        let harmony = rendered("harmony", &TALK);
        let (head, talk) = harmony.split_once("Channel must be included for every message.<|end|>").unwrap();
        assert!(head.starts_with("<|start|>system<|message|>You are ChatGPT") && head.contains("\nCurrent date: 20"));
        assert_eq!(
            talk,
            "<|start|>developer<|message|># Instructions\n\nBe brief.<|end|><|start|>user<|message|>Hi<|end|>\
             <|start|>assistant<|channel|>final<|message|>Yes?<|end|><|start|>user<|message|>1+1?<|end|>\
             <|start|>assistant"
        );
        assert_eq!(BUILT_IN.len(), cases.len() + 1);
    }

    #[test]
    fn a_template_without_special_tokens_in_the_configuration_renders() {
        let template = ChatTemplate::from_source(BUILT_IN[1].source);
        assert_eq!(template.render(&[Message::new("user", "Hi")], 99).unwrap(), "[INST] Hi [/INST]");
    }

    #[test]
    fn templates_are_named_by_name_alias_or_path() {
        assert_eq!("auto".parse(), Ok(TemplateChoice::Auto));
        assert_eq!("gpt-oss".parse::<TemplateChoice>(), "HARMONY".parse());
        assert_eq!("./mine".parse(), Ok(TemplateChoice::File("./mine".into())));
        assert!("chatmal".parse::<TemplateChoice>().unwrap_err().contains("chatml"));
    }
}
