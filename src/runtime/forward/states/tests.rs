use super::window::BACK;
use super::*;
use crate::rng::Rng;
use folded::CHUNK;

const CHANNELS: usize = 3;

fn layout() -> StateLayout {
    let layer = |reach, folded| Some(LayerSizes { channels: CHANNELS, reach, folded });
    let folded = FoldedSizes { groups: 2, per_group: 2, key: 1, value: 1 };
    StateLayout { layers: vec![None, layer(2, None), layer(6, None), layer(3, Some(folded))] }
}

/// Reads tokens, each the value of all inputs at its position and of all keys, into a layer. A full chunk adds the sum
/// of its tokens, each times one more than its place in the chunk, to the matrix.
fn read_layer(state: &mut LayerState, tokens: &[f32]) {
    let rows: Vec<f32> = tokens.iter().flat_map(|token| [*token; CHANNELS]).collect();
    let Some(folded) = &mut state.folded else { return state.window.push(tokens.len(), &rows) };
    for mut group in folded.read(tokens.len()) {
        for token in tokens {
            group.keys[group.offset] = *token;
            group.offset += 1;
            if group.offset == CHUNK {
                let sum: f32 = (1..).zip(group.keys.iter()).map(|(i, key)| i as f32 * key).sum();
                group.matrix.get_mut().iter_mut().for_each(|x| *x += sum);
                group.offset = 0;
            }
        }
    }
    let needed = state.window.needed_of(tokens.len());
    state.window.push(tokens.len(), &rows[(tokens.len() - needed) * CHANNELS..]);
}

fn read(states: &mut States, tokens: &[f32]) {
    states.recurrent().for_each(|state| read_layer(state, tokens));
}

/// Checks that the next position would read what the tokens before it left.
fn check(states: &mut States, text: &[f32]) {
    for state in states.recurrent() {
        let [_, reach] = state.window.sizes();
        let mut rows = Vec::new();
        state.window.read(&mut rows);
        let token = |i: usize| (text.len() + i).checked_sub(reach).map_or(0.0, |position| text[position]);
        let expected: Vec<f32> = (0..reach).flat_map(|i| [token(i); CHANNELS]).collect();
        assert_eq!((rows, state.window.end()), (expected, text.len()));
        let (chunks, rest) = text.as_chunks::<CHUNK>();
        let sum = |chunk: &[f32; CHUNK]| (1..).zip(chunk).map(|(i, key)| i as f32 * key).sum::<f32>();
        let matrix = chunks.iter().fold(0.0, |matrix, chunk| matrix + sum(chunk));
        // Reading nothing shows the state.
        for group in state.folded.iter_mut().flat_map(|folded| folded.read(0)) {
            assert_eq!((group.offset, group.matrix.get()), (rest.len(), &[matrix, matrix][..]));
            assert_eq!(group.keys[..rest.len()], *rest);
        }
    }
}

#[test]
fn any_sequence_of_steps_leaves_what_the_next_position_reads() {
    let (mut rng, mut states, mut text, mut mark) = (Rng::new(5), layout().start(), Vec::new(), 0);
    // Rows are kept from the first number on, and back from the second.
    let (mut since, mut peak) = (0, 0);
    for _ in 0..5000 {
        match rng.next_u64() % 4 {
            0 => {
                states.mark();
                mark = text.len();
            }
            1 => {
                let wanted = match rng.next_u64() % 4 {
                    0 => rng.next_u64() as usize % (text.len() + 1),
                    _ => text.len().saturating_sub(rng.next_u64() as usize % 6),
                };
                let left = states.rewind(wanted);
                let in_chunk = wanted >= peak / CHUNK * CHUNK;
                let is_kept = wanted >= since && peak - wanted <= BACK && in_chunk;
                assert!(left == wanted || !is_kept && (left == 0 || left == mark), "{left} of {wanted}");
                // The mark is reached again within the chunk that follows its own.
                let marked = mark > 0 && wanted >= mark && text.len() / CHUNK <= mark / CHUNK + 1;
                assert!(left <= wanted && (left >= mark || !marked), "{left} of {wanted}, {mark}");
                if left != wanted {
                    (since, peak) = (left, left);
                }
                text.truncate(left);
                mark = if mark <= left { mark } else { 0 };
            }
            2 => {
                let snapshot = states.snapshot();
                let bytes = snapshot.bytes().unwrap();
                assert_eq!(bytes.len(), layout().bytes());
                let read = layout().snapshot(&bytes);
                let kept = if rng.next_u64().is_multiple_of(2) { snapshot } else { read };
                states = layout().start();
                states.adopt(&kept, text.len());
                (mark, since, peak) = (0, text.len(), text.len());
            }
            _ => {
                let more = rng.next_u64() as usize % if rng.next_u64().is_multiple_of(8) { 190 } else { 5 };
                // Whole numbers, so that sums are exact in any order.
                let tokens: Vec<f32> = (0..more).map(|_| (rng.next_u64() % 8) as f32).collect();
                read(&mut states, &tokens);
                text.extend(tokens);
                peak = peak.max(text.len());
            }
        }
        check(&mut states, &text);
    }
}

#[test]
fn tokens_behind_a_border_are_taken_back_to_the_mark_before_it() {
    let (mut states, text) = (layout().start(), [1.0; 3 * CHUNK]);
    read(&mut states, &text[..CHUNK - 2]);
    states.mark();
    read(&mut states, &text[..5]);
    assert_eq!(states.rewind(CHUNK + 1), CHUNK + 1);
    assert_eq!(states.rewind(CHUNK - 1), CHUNK - 2, "the rows of the step before the border are not kept");
    check(&mut states, &text[..CHUNK - 2]);
    read(&mut states, &text[..5]);
    states.mark();
    assert_eq!(states.rewind(CHUNK - 2), 0, "the tokens of the border were accepted");
}

#[test]
fn a_clone_and_a_snapshot_do_not_see_later_tokens() {
    let mut states = layout().start();
    read(&mut states, &[2.0; 50]);
    let (snapshot, mut clone) = (states.snapshot(), states.clone());
    read(&mut states, &[3.0; 50]);
    check(&mut clone, &[2.0; 50]);
    states.adopt(&snapshot, 50);
    check(&mut states, &[2.0; 50]);
}

#[test]
fn no_snapshot_has_the_length_of_a_page() {
    for (channels, reach) in [(16, 1), (64, 2), (66, 2), (7, 6)] {
        let layout = StateLayout { layers: vec![Some(LayerSizes { channels, reach, folded: None })] };
        assert!(!layout.bytes().is_multiple_of(size_of::<Line>()));
        let mut states = layout.start();
        let bytes = states.snapshot().bytes().unwrap().into_owned();
        assert_eq!(bytes.len(), layout.bytes());
        states.adopt(&layout.snapshot(&bytes), 9);
        assert_eq!(states.layer(0).end(), 9);
    }
}

#[test]
fn a_step_that_only_some_layers_have_read_is_taken_back() {
    let (mut states, text) = (layout().start(), [0.5; 40]);
    read(&mut states, &text);
    states.mark();
    read_layer(states.layer(1), &[7.0; 30]);
    assert_eq!(states.rewind(40), 40);
    check(&mut states, &text);
}
