//! [`shares`]: max-min fair shares of a limited amount. Pure.

/// Divides `room` among the claimants (max-min fairness). No claimant gets more than it wants. A claimant that gets
/// less than it wants gets at least as much as any other, except for an indivisible remainder.
pub fn shares(wants: &[usize], mut room: usize) -> Vec<usize> {
    let mut by_want: Vec<_> = wants.iter().copied().enumerate().collect();
    by_want.sort_by_key(|(_, wants)| *wants);
    let mut left = by_want.len();
    let mut shares = Vec::with_capacity(left);
    for (at, wants) in by_want {
        let share = wants.min(room / left);
        (room, left) = (room - share, left - 1);
        shares.push((at, share));
    }
    shares.sort_unstable();
    shares.into_iter().map(|(_, share)| share).collect()
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    #[test]
    fn the_modest_get_all_and_the_others_alike() {
        assert_eq!(shares(&[200, 3, 50, 0], 100), [49, 3, 48, 0]);
        assert_eq!(shares(&[200, 3], 300), [200, 3]);
        assert_eq!(shares(&[], 10), [0_usize; 0]);
    }

    proptest! {
        #[test]
        fn nobody_pays_for_another(wants in vec(0..50_usize, 0..20), room in 0..300_usize) {
            let shares = shares(&wants, room);
            prop_assert_eq!(shares.iter().sum::<usize>(), wants.iter().sum::<usize>().min(room));
            for (share, wants) in shares.iter().zip(&wants) {
                let most = shares.iter().max().copied().unwrap_or(0);
                prop_assert!(share == wants || (share < wants && share + 1 >= most), "{:?}", shares);
            }
        }
    }
}
