//! The thread of a model that is not loaded: answers what can be answered, until the model is to be loaded.

use super::UsageOf;
use crate::host::KeyChange;
use crate::host::model::Command;
use crate::host::reply::{Refusal, Reply};
use std::sync::mpsc::Receiver;

/// Waits until the model is to be loaded. Returns false if the server ends before.
pub fn wait(commands: &Receiver<Command>, changes: &mut Vec<KeyChange>, usage: &UsageOf) -> bool {
    loop {
        match commands.recv() {
            Ok(Command::Load) => return true,
            Ok(Command::Drain(_)) | Err(_) => return false,
            Ok(Command::Keys(new)) => changes.extend(new),
            Ok(Command::Usage(answer)) => _ = answer.send(usage.clone()),
            Ok(Command::Slots(answer)) => answer.send(Vec::new()),
            // Pages on disk are removed by the engine, which alone knows them.
            Ok(Command::FlushPrefixes(answer)) => answer.send(false),
            Ok(Command::Arrive(arrival)) => {
                arrival.outlet.send(Reply::Refused(Refusal::Stopped("the model is not loaded".into())));
            }
            Ok(Command::Cancel(_) | Command::Unload | Command::Compute(_)) => {}
            #[cfg(test)]
            Ok(Command::Panic) => {}
        }
    }
}
