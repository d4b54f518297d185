//! A conversation on the terminal, or one message per line of standard input.

use super::Args;
use crate::console;
use crate::global::Global;
use iec::error::{Cause, Context, Result};
use iec::files::Stream;
use iec::runtime::generate::Completion;
use iec::session::Session;
use iec::session::chat::{Conversation, Place};
use iec::session::prompts;
use std::io::{BufReader, IsTerminal};

/// Runs the conversation until the input ends.
pub fn chat(args: &Args, session: &mut Session, global: &Global) -> Result<()> {
    let mut conversation = Conversation::new(session, args.system.as_deref())?;
    if let Some(prompt) = &args.prompt {
        return answer(&mut conversation, prompt.clone(), args, session, global);
    }
    let interactive = std::io::stdin().is_terminal();
    if interactive {
        global.note("/reset forgets the conversation, /exit or Ctrl-D ends it");
    }
    let mut input = BufReader::new(Stream::of(std::io::stdin()));
    loop {
        if interactive {
            console::note_part("> ");
        }
        let Some(line) = prompts::read_line(&mut input).at("standard input")? else { break };
        match line.trim() {
            "" => continue,
            "/exit" if interactive => break,
            "/reset" if interactive => conversation.reset(),
            _ => match answer(&mut conversation, line, args, session, global) {
                // The conversation has outgrown the context: the user can shorten or reset it.
                Err(e) if interactive && matches!(e.cause(), Cause::Usage(_)) => {
                    console::note(format_args!("error: {e}\nhelp: /reset forgets the conversation"));
                }
                answered => answered?,
            },
        }
    }
    Ok(())
}

fn answer(
    conversation: &mut Conversation,
    message: String,
    args: &Args,
    session: &mut Session,
    global: &Global,
) -> Result<()> {
    let request = args.request(session, Vec::new());
    let done = conversation.answer(message, session, request, &args.generate_options(), |place, text| match place {
        _ if args.special => console::print(text),
        Place::Answer => console::print(text),
        Place::Aside if !global.quiet => {
            console::note_part(text);
            Ok(())
        }
        Place::Aside | Place::Header => Ok(()),
    })?;
    console::print_line("")?;
    global.note(describe(&done));
    Ok(())
}

fn describe(done: &Completion) -> String {
    let seconds = done.decode_time().as_secs_f64();
    let rate = if seconds > 0.0 { (done.ids.len() - 1) as f64 / seconds } else { 0.0 };
    format!(
        "{} prompt tokens ({} reused), {} new, {rate:.1} tokens/s",
        done.prompt_tokens,
        done.reused_tokens,
        done.ids.len()
    )
}
