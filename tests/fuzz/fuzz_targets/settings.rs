//! The values of settings, as annotations and flags have them: each is read or refused, and what was read is shown in a form
//! that is read again as the same.

#![no_main]

use libfuzzer_sys::fuzz_target;
use mirror_core::settings::{SETTINGS, Settings};

fuzz_target!(|input: (u8, &str)| {
    let (which, value) = input;
    let setting = &SETTINGS[usize::from(which) % SETTINGS.len()];
    let key = setting.key;
    let mut settings = Settings::default();
    if settings.set(key, value).is_err() {
        return;
    }
    settings.words();
    if let Some(shown) = setting.show(&settings) {
        let mut again = Settings::default();
        assert!(again.set(key, &shown).is_ok(), "{key}: {value:?} is shown as {shown:?}");
        assert!(again.asks_the_same(&settings), "{key}: {value:?} is shown as {shown:?}");
    }
});
