//! `iec recipes`: lists and prints the quantization recipes of the program, and the JSON Schema of manifests.

use crate::console;
use crate::global::Global;
use iec::error::Result;
use iec::manifest::recipes::{RECIPES, SCHEMA, named};
use iec::report::table::Table;
use serde_json::json;

/// Arguments of `iec recipes`.
#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:
  iec recipes
  iec recipes llama-3 > rules.json
  iec pack models/llama --recipe llama-3 --out-dir packs/llama-q4

A recipe is a manifest of rules: `iec pack --recipe NAME` applies it in one step, and a changed copy can be given to
`iec ptq --rules` and `iec pack --q4-map`.")]
pub struct Args {
    /// Recipe to print as it is
    #[arg(value_name = "NAME")]
    name: Option<String>,
    /// Print the JSON Schema of manifests
    #[arg(long, conflicts_with_all = ["name", "json"])]
    schema: bool,
    /// Print the list as one JSON line
    #[arg(long, conflicts_with = "name")]
    pub json: bool,
}

/// Runs the command.
pub fn run(args: Args, _global: &Global) -> Result<()> {
    match args.name {
        _ if args.schema => console::print_data(SCHEMA),
        Some(name) => console::print_data(named(&name)?.text),
        None if args.json => {
            let list = RECIPES.map(|recipe| json!({"name": recipe.name, "bits": recipe.bits, "about": recipe.about}));
            console::print_json(&json!({"recipes": list}))
        }
        None => {
            let columns: [iec::report::table::Column<'_, &iec::manifest::recipes::Recipe>; 3] = [
                ("recipe", &|recipe| recipe.name.to_string()),
                (">bits", &|recipe| recipe.bits.to_string()),
                ("tensors", &|recipe| recipe.about.to_string()),
            ];
            console::print(Table::of(&RECIPES, &columns))
        }
    }
}
