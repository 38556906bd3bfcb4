//! Random expressions of the supported language on random frames: podmirror's results must be libpcap's.

use std::time::Instant;

use mirror_core::filter;
use mirror_tests::{
    filters::{expression, frame},
    random::{Random, from_environment},
};

use crate::oracle::{Pair, Theirs, hex};

/// Frames per expression.
const FRAMES: usize = 40;
/// podmirror's error for an expression that contradicts itself.
const NOTHING_MATCHES: &str = "no packet can match this";

#[test]
fn random_expressions_give_the_answers_of_libpcap() {
    let mut random = Random::from_clock("expressions");
    let wanted = from_environment("MIRROR_FUZZ_PAIRS", || 100_000) as usize;
    let started = Instant::now();
    let [mut pairs, mut accepted, mut expressions, mut impossible, mut refused, mut contradictions] = [0; 6];
    let [mut instructions, mut their_instructions] = [0; 2];
    while pairs < wanted {
        let text = expression(&mut random);
        let pair = match Pair::compile(&text) {
            Ok(pair) => pair,
            Err(error) if error.reason == NOTHING_MATCHES => {
                impossible += 1;
                let theirs = Theirs::compile(&text, false).unwrap();
                for _ in 0..FRAMES {
                    let frame = frame(&mut random);
                    assert!(
                        !theirs.matches(&frame),
                        "we say that nothing can match: ({text:?}, \"{}\")",
                        hex(&frame)
                    );
                    pairs += 1;
                }
                continue;
            }
            Err(error) => {
                // libpcap does not evaluate constant expressions.
                let is_computed = error.reason.contains("division by zero") || error.reason.contains("shift");
                let refuse_too = is_computed || Theirs::compile(&text, false).is_err();
                assert!(refuse_too, "{text:?} is refused by us alone: {error}");
                refused += 1;
                continue;
            }
        };
        expressions += 1;
        let mut contradicted = None;
        let (our_length, their_length) = pair.instructions();
        instructions += our_length;
        their_instructions += their_length;
        for _ in 0..FRAMES {
            let mut frame = frame(&mut random);
            accepted += usize::from(pair.answer(&frame));
            pair.answer_of_cut(&frame, random.below(frame.len() + 1));
            pairs += 1;
            frame.resize(frame.len().max(300), 0);
            pair.answer(&frame);
            if !pair.optimiser_agrees(&frame) {
                contradictions += 1;
                contradicted = Some(text.clone());
            }
        }
        if let Some(text) = contradicted {
            println!("libpcap's optimiser changes the answer of {text:?}");
        }
    }
    println!(
        "{pairs} pairs, {accepted} accepted, {expressions} expressions, {impossible} that \
         nothing can match, {refused} that libpcap refuses too, {contradictions} where libpcap contradicts itself, \
         {instructions} instructions where libpcap has {their_instructions}, {:?}",
        started.elapsed()
    );
    let share = accepted as f64 / pairs as f64;
    assert!((0.05..0.95).contains(&share), "the frames say little: {share} of them match");
    assert!(contradictions * 200 < pairs, "more than what is known of libpcap's optimiser");
    assert!(refused * 5 < expressions, "{refused} of {expressions} expressions are refused");
}

/// Removes, doubles and swaps words: what podmirror's compiler accepts, libpcap accepts too, with the same meaning.
#[test]
fn damaged_expressions_mean_what_libpcap_takes_them_for() {
    let mut random = Random::from_clock("damaged expressions");
    let (mut taken, mut refused) = (0, 0);
    for _ in 0..from_environment("MIRROR_FUZZ_PAIRS", || 100_000) / 50 {
        let text = expression(&mut random);
        let spaced = text.replace('(', " ( ").replace(')', " ) ");
        let mut words: Vec<&str> = spaced.split_whitespace().collect();
        for _ in 0..=random.below(2) {
            let (one, other) = (random.below(words.len()), random.below(words.len()));
            match random.below(3) {
                0 if words.len() > 1 => drop(words.remove(one)),
                1 => words.insert(one, words[other]),
                _ => words.swap(one, other),
            }
        }
        let damaged = words.join(" ");
        // podmirror's grammar, but not libpcap's, allows a group of ids at the beginning of another group. And libpcap
        // checks the offset of a field as if it were the divisor or the shift.
        let has_more = ["( (", "/", "%", "<<", ">>"].iter().any(|more| damaged.contains(more));
        if has_more && Theirs::compile(&damaged, false).is_err() {
            continue;
        }
        // Where a frame is not Geneve, libpcap's program reads uninitialised memory.
        if damaged.contains("geneve") {
            continue;
        }
        match Pair::compile(&damaged) {
            Ok(pair) => {
                taken += 1;
                for _ in 0..10 {
                    pair.answer(&frame(&mut random));
                }
            }
            Err(filter::FilterError { position, part, reason }) => {
                refused += 1;
                assert!(!reason.is_empty());
                assert_eq!(damaged.get(position..position + part.len()), Some(part.as_str()), "{damaged:?}");
            }
        }
    }
    println!("{taken} taken, {refused} refused");
    assert!(taken > 0 && refused > 0);
}
