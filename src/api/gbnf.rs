//! Grammars in GBNF, the language of llama.cpp, as regular expressions.
//!
//! A rule is `name ::= expression`. An expression is made of texts, classes of characters, names of rules, groups,
//! choices and repetitions. As long as no rule refers to itself, each name can be replaced by its rule, and the whole
//! grammar is a regular expression with exactly the same texts. Other grammars are refused: the grammars of this
//! program, in the language of Lark, find words first and have no counterpart of rules over single characters.

use std::collections::BTreeMap;

/// Longest regular expression in bytes.
const LONGEST: usize = 64 << 10;
/// Deepest nesting of groups, and of rules that name rules.
const DEEPEST: usize = 64;
/// Deepest nesting of the groups of all rules together.
const DEEPEST_OF_ALL: usize = 256;
/// Largest number of repetitions directly behind one another, such as `"a"*?`.
const MOST_REPEATED: usize = 4;
/// Name of the rule that describes the whole text.
const ROOT: &str = "root";

/// Returns true if a grammar is written in this language.
pub fn is_gbnf(text: &str) -> bool {
    text.contains("::=")
}

/// Returns the regular expression of the texts of a grammar.
///
/// # Errors
/// The grammar has another form, a rule is missing or refers to itself, or the expression is too long.
pub fn to_regex(text: &str) -> Result<String, String> {
    let rules = Parser { text, at: 0, depth: 0 }.rules()?;
    let mut out = String::new();
    Writer { rules: &rules, open: Vec::new(), depth: 0, out: &mut out }.rule(ROOT)?;
    Ok(out)
}

/// Part of a rule.
#[derive(Debug, PartialEq)]
enum Node {
    /// A piece of a regular expression that stands for texts, without choices outside of groups.
    Pattern(String),
    Rule(String),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    /// A node with the repetition behind it, such as `*` or `{2,3}`.
    Repeated(Box<Node>, String),
}

type Rules = BTreeMap<String, Node>;

struct Parser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

impl Parser<'_> {
    fn rules(mut self) -> Result<Rules, String> {
        let mut rules = Rules::new();
        self.space(true);
        while self.at < self.text.len() {
            let name = self.name().ok_or_else(|| self.fault("the name of a rule"))?;
            self.space(false);
            if !self.takes("::=") {
                return Err(self.fault("`::=` behind the name of a rule"));
            }
            self.space(true);
            let rule = self.choice()?;
            self.space(true);
            if rules.insert(name.clone(), rule).is_some() {
                return Err(format!("found the rule `{name}` twice"));
            }
        }
        Ok(rules)
    }

    /// Reads a choice. A line break ends it unless it lies in a group or behind a `|`.
    fn choice(&mut self) -> Result<Node, String> {
        let mut choices = vec![self.sequence()?];
        while self.takes("|") {
            self.space(true);
            choices.push(self.sequence()?);
        }
        Ok(if choices.len() == 1 { choices.remove(0) } else { Node::Choice(choices) })
    }

    fn sequence(&mut self) -> Result<Node, String> {
        let mut all: Vec<Node> = Vec::new();
        loop {
            self.space(self.depth > 0);
            let node = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    Node::Pattern("(?:.|\\n)".into())
                }
                Some('(') => self.group()?,
                Some(c) if is_word(c) => match self.name() {
                    Some(name) => Node::Rule(name),
                    None => break,
                },
                _ => break,
            };
            all.push(self.repeated(node)?);
        }
        match self.peek() {
            None | Some('|' | '\n') => Ok(Node::Sequence(all)),
            Some(')') if self.depth > 0 => Ok(Node::Sequence(all)),
            Some(_) => Err(self.fault("a text, a class, a name or a group")),
        }
    }

    fn group(&mut self) -> Result<Node, String> {
        self.at += 1;
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err(format!("found groups more than {DEEPEST} deep"));
        }
        self.space(true);
        let inner = self.choice()?;
        self.space(true);
        if !self.takes(")") {
            return Err(self.fault("`)`"));
        }
        self.depth -= 1;
        Ok(inner)
    }

    /// Reads the repetitions behind a node. A second one, as in `"a"**`, repeats the repetition.
    fn repeated(&mut self, mut node: Node) -> Result<Node, String> {
        let mut marks = 0;
        while let Some(mark) = self.repetition()? {
            marks += 1;
            if marks > MOST_REPEATED {
                return Err(format!("found more than {MOST_REPEATED} repetitions behind one another"));
            }
            node = Node::Repeated(Box::new(node), mark);
        }
        Ok(node)
    }

    fn repetition(&mut self) -> Result<Option<String>, String> {
        match self.peek() {
            Some(c @ ('*' | '+' | '?')) => {
                self.at += 1;
                Ok(Some(c.to_string()))
            }
            Some('{') => {
                let end = self.text[self.at..].find('}').ok_or_else(|| self.fault("`}`"))?;
                let counts = &self.text[self.at + 1..self.at + end];
                let count = |text: &str| {
                    let text = text.trim();
                    let is_count = text.len() <= 4 && text.bytes().all(|byte| byte.is_ascii_digit());
                    text.parse::<u32>().ok().filter(|_| is_count)
                };
                let form = || self.fault("`{m}`, `{m,}` or `{m,n}` with n not below m");
                let (least, most) = counts.split_once(',').unwrap_or((counts, counts));
                let least = count(least).ok_or_else(form)?;
                let counts = match most.trim() {
                    "" => format!("{least},"),
                    most => format!("{least},{}", count(most).filter(|most| *most >= least).ok_or_else(form)?),
                };
                self.at += end + 1;
                Ok(Some(format!("{{{counts}}}")))
            }
            _ => Ok(None),
        }
    }

    fn literal(&mut self) -> Result<Node, String> {
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.character()? {
                ('"', false) => break,
                ('\n', false) => return Err(self.fault("`\"` at the end of a text")),
                (c, _) => text.push(c),
            }
        }
        Ok(Node::Pattern(text.chars().map(escaped).collect()))
    }

    fn class(&mut self) -> Result<Node, String> {
        self.at += 1;
        let mut class = String::from(if self.takes("^") { "[^" } else { "[" });
        let empty = class.len();
        loop {
            let first = match self.character()? {
                (']', false) => break,
                (c, _) => c,
            };
            class += &escaped(first);
            let is_range = self.peek() == Some('-') && !self.text[self.at + 1..].starts_with(']');
            if is_range {
                self.at += 1;
                let (last, _) = self.character()?;
                if last < first {
                    return Err(self.fault("a range with its lower end first"));
                }
                class += &format!("-{}", escaped(last));
            }
        }
        match class.len() == empty {
            true => Err(self.fault("a class with a character")),
            false => Ok(Node::Pattern(class + "]")),
        }
    }

    /// Reads a character of a text or class; the second value tells whether it was escaped.
    fn character(&mut self) -> Result<(char, bool), String> {
        let c = self.next().ok_or_else(|| self.fault("the end of a text or class"))?;
        if c != '\\' {
            return Ok((c, false));
        }
        let kind = self.next().ok_or_else(|| self.fault("a character behind `\\`"))?;
        let c = match kind {
            'n' => '\n',
            'r' => '\r',
            't' => '\t',
            'x' => self.hex(2)?,
            'u' => self.hex(4)?,
            'U' => self.hex(8)?,
            c @ ('"' | '\\' | '[' | ']' | '-' | '^') => c,
            _ => return Err(self.fault("a known escape")),
        };
        Ok((c, true))
    }

    fn hex(&mut self, digits: usize) -> Result<char, String> {
        let text = self.text.get(self.at..self.at + digits).filter(|text| text.bytes().all(|b| b.is_ascii_hexdigit()));
        let number = text.and_then(|text| u32::from_str_radix(text, 16).ok()).and_then(char::from_u32);
        let c = number.ok_or_else(|| self.fault("the number of a character"))?;
        self.at += digits;
        Ok(c)
    }

    fn name(&mut self) -> Option<String> {
        let rest = &self.text[self.at..];
        let name = &rest[..rest.find(|c| !is_word(c)).unwrap_or(rest.len())];
        self.at += name.len();
        (!name.is_empty()).then(|| name.to_string())
    }

    /// Skips spaces and comments, and line breaks if `breaks` is set.
    fn space(&mut self, breaks: bool) {
        loop {
            match self.peek() {
                Some(' ' | '\t') => self.at += 1,
                Some('\r' | '\n') if breaks => self.at += 1,
                Some('\r') => self.at += 1,
                Some('#') => {
                    let rest = &self.text[self.at..];
                    self.at += rest.find('\n').unwrap_or(rest.len());
                }
                _ => return,
            }
        }
    }

    fn takes(&mut self, mark: &str) -> bool {
        let found = self.text[self.at..].starts_with(mark);
        self.at += if found { mark.len() } else { 0 };
        found
    }

    fn peek(&self) -> Option<char> {
        self.text[self.at..].chars().next()
    }

    fn next(&mut self) -> Option<char> {
        let c = self.peek()?;
        self.at += c.len_utf8();
        Some(c)
    }

    fn fault(&self, expected: &str) -> String {
        let line = 1 + self.text[..self.at].matches('\n').count();
        let rest: String = self.text[self.at..].chars().take_while(|c| *c != '\n').take(20).collect();
        format!("line {line} of the GBNF grammar: found `{rest}`, expected {expected}")
    }
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

/// Returns the regular expression of a character, inside and outside of classes.
fn escaped(c: char) -> String {
    match c {
        '\n' => "\\n".into(),
        '\r' => "\\r".into(),
        '\t' => "\\t".into(),
        // With a backslash, `<` and `>` would be assertions.
        c if regex_syntax::is_meta_character(c) => format!("\\{c}"),
        c if c.is_ascii_graphic() || !c.is_ascii() && !c.is_control() => c.into(),
        c => format!("\\x{{{:x}}}", u32::from(c)),
    }
}

/// Writes the regular expression of rules.
struct Writer<'a> {
    rules: &'a Rules,
    /// Rules around the current place.
    open: Vec<&'a str>,
    /// Groups around the current place.
    depth: usize,
    out: &'a mut String,
}

impl<'a> Writer<'a> {
    fn rule(&mut self, name: &str) -> Result<(), String> {
        let (name, node) =
            self.rules.get_key_value(name).ok_or_else(|| format!("the GBNF grammar has no rule `{name}`"))?;
        if self.open.contains(&name.as_str()) {
            return Err(format!(
                "the rule `{name}` of the GBNF grammar refers to itself, which this server cannot honour; \
                 write the grammar in the language of Lark, or send a JSON schema"
            ));
        }
        if self.open.len() == DEEPEST {
            return Err(format!("found rules more than {DEEPEST} deep"));
        }
        self.open.push(name);
        self.grouped(node)?;
        self.open.pop();
        Ok(())
    }

    fn grouped(&mut self, node: &'a Node) -> Result<(), String> {
        self.depth += 1;
        if self.depth > DEEPEST_OF_ALL {
            return Err(format!("found groups and rules more than {DEEPEST_OF_ALL} deep"));
        }
        self.out.push_str("(?:");
        self.node(node)?;
        self.out.push(')');
        self.depth -= 1;
        match self.out.len() > LONGEST {
            true => Err(format!("the GBNF grammar needs a regular expression of more than {LONGEST} bytes")),
            false => Ok(()),
        }
    }

    fn node(&mut self, node: &'a Node) -> Result<(), String> {
        match node {
            Node::Pattern(pattern) => self.out.push_str(pattern),
            Node::Rule(name) => self.rule(name)?,
            Node::Sequence(all) => {
                for one in all {
                    match one {
                        Node::Choice(_) | Node::Sequence(_) => self.grouped(one)?,
                        _ => self.node(one)?,
                    }
                }
            }
            Node::Choice(choices) => {
                for (i, choice) in choices.iter().enumerate() {
                    self.out.push_str(if i == 0 { "" } else { "|" });
                    self.node(choice)?;
                }
            }
            Node::Repeated(inner, mark) => {
                self.grouped(inner)?;
                self.out.push_str(mark);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use regex::Regex;

    #[test]
    fn a_grammar_has_the_same_texts_as_its_regular_expression() {
        struct Case {
            grammar: &'static str,
            texts: &'static [&'static str],
            others: &'static [&'static str],
        }
        let cases = [
            Case { grammar: "root ::= \"yes\" | \"no\"", texts: &["yes", "no"], others: &["", "yesno", "Yes"] },
            Case {
                grammar: "# a comment\nroot ::= item (\", \" item)* \".\"? # behind\nitem ::= [a-z]+ | number\n\
                          number ::= [0-9]{1,3}",
                texts: &["a", "ab, 12, c.", "123"],
                others: &["1234", "a,b", "A", "a, "],
            },
            Case {
                grammar: "root ::= (\n  \"a\" |\n  \"b\"\n)+ \"\\n\"\n",
                texts: &["a\n", "abba\n"],
                others: &["a", "\n"],
            },
            Case {
                grammar: r#"root ::= [^"\\\n\]-] "\x41\u00e9\U0001F600" [\x30-\u0039\-] ."#,
                texts: &["xAé😀5\n", "[Aé😀-é"],
                others: &["]Aé😀5x", "\"Aé😀5x", "-Aé😀5x", "xAé😀a."],
            },
            Case { grammar: "root ::= \"<a> \" [<-> &~#-]", texts: &["<a> >", "<a> &"], others: &["a >", "<a> a"] },
            Case { grammar: "root ::= \"a.b|c*\" \"\"", texts: &["a.b|c*"], others: &["aXb|c*", "a.b"] },
            Case {
                grammar: "root ::= x-1 x_2{ 0, 2 }\nx-1 ::= \"a\" | \"b\"\nx_2 ::= \"c\"?",
                texts: &["acc", "b"],
                others: &["ccc"],
            },
            Case { grammar: "root ::= \"a\" |\n  \"b\"\n", texts: &["a", "b"], others: &["ab"] },
        ];
        for Case { grammar, texts, others } in cases {
            let pattern = to_regex(grammar).unwrap_or_else(|e| panic!("{grammar}: {e}"));
            let regex = Regex::new(&format!("^(?:{pattern})$")).unwrap();
            for text in texts {
                assert!(regex.is_match(text), "{grammar}: {text:?} by {pattern}");
            }
            for text in others {
                assert!(!regex.is_match(text), "{grammar}: {text:?} by {pattern}");
            }
        }
    }

    #[test]
    fn grammars_that_are_not_regular_or_not_valid_are_refused() {
        let deep = format!("root ::= {}\"a\"{}", "(".repeat(99), ")".repeat(99));
        let repeated = format!("root ::= \"a\"{}", "*".repeat(1 << 20));
        // Each rule has some groups, and leads to the next one.
        let (open, close) = ("(".repeat(40), ")".repeat(40));
        let rules: String = (0..40).map(|i| format!("r{i} ::= {open}r{}{close}\n", i + 1)).collect();
        let nested = format!("root ::= r0\n{rules}r40 ::= \"a\"");
        let large: String = (0..20).map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1)).collect();
        let large = format!("root ::= r0\n{large}r20 ::= \"a\"");
        let cases = [
            ("root ::= \"(\" root \")\" | \"x\"", "`root` of the GBNF grammar refers to itself"),
            ("root ::= a\na ::= b\nb ::= a | \"x\"", "refers to itself"),
            ("root ::= other", "has no rule `other`"),
            ("other ::= \"x\"", "has no rule `root`"),
            ("root ::= \"x", "expected"),
            ("root ::= [a", "expected"),
            ("root ::= []", "a class with a character"),
            ("root ::= [z-a]", "lower end first"),
            ("root ::= (\"a\"", "expected `)`"),
            ("root ::= \"a\"{x}", "`{m}`"),
            ("root ::= \"a\"{2 3}", "`{m}`"),
            ("root ::= \"a\"{3,2}", "not below m"),
            ("root ::= \"\\q\"", "a known escape"),
            ("root ::= <[5]>", "line 1 of the GBNF grammar: found `<[5]>`"),
            ("root = \"a\"\nx ::= \"b\"", "`::=`"),
            ("root ::= \"a\"\nroot ::= \"b\"", "twice"),
            (&deep, "deep"),
            (&nested, "deep"),
            (&repeated, "behind one another"),
            (&large, "more than"),
        ];
        for (grammar, said) in cases {
            let error = to_regex(grammar).unwrap_err();
            let begin: String = grammar.chars().take(80).collect();
            assert!(error.contains(said), "{begin}: {error}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_a_grammar_or_an_error(text in "(root ::= )?[a-c\"\\[\\](){}|*+?.^\\\\ \\n#:=0-9x-]{0,40}") {
            if let Ok(pattern) = to_regex(&text) {
                prop_assert!(regex_syntax::parse(&pattern).is_ok(), "{}", pattern);
            }
        }
    }
}
