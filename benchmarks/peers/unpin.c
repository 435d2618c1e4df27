/*
 * The release walks in plain C, as peers for the engine's: the same struct pages, the same atomics, the same checks,
 * the same array of PFNs. bench_unpin.py compiles this with the flags of the extension and calls it without the GIL.
 *
 *	peer_page	a head look-up and an update an entry: the kernel before 2021
 *	peer_head	a head look-up an entry, an update a group of neighbours with one head: the kernel since
 *	peer_run	a look-up and an update a group; members are told from the list alone
 *	peer_range	a look-up and an update a folio, over contiguous PFNs
 *
 * Each drops one pin of every page and returns how many pins it dropped; NULL (PFN 0) and the zero page have none. An
 * entry that would bring a counter to 0 or below ends the walk with -1 - index: nobody here can free, and a benchmark
 * keeps the allocation's reference on every folio, so that it does not happen.
 */
#include <stdint.h>

#include "page.h"
#include "atomic.h"

#define PG_HEAD 6
#define PIN_SHIFT 10		/* a pin of a small folio is 1024 on _refcount */

/* Measured, ns/page with order 0 shuffled: 32 ahead 7.2, 48 5.5, 64 4.9, 128 4.9. The first level cache has room. */
#define AHEAD 128
#define STEP 8
#define SHORT_GROUP 8		/* below: prefetch page by page; from here on folio by folio */
#define SMALL_FOLIO 16		/* pages; up to here members are tested one by one, beyond in blocks */

static inline uint64_t head_of(uint64_t pfn, uint64_t word)
{
	uint64_t mask = ((word & 1) - 1) | word;

	return ((pfn << 6) & mask) >> 6;
}

static inline uint64_t word_at(const struct page *map, uint64_t pfn)
{
	return a64_load_relaxed(&map[pfn].compound_info);
}

static inline int is_head(const struct page *page)
{
	return (a64_load_relaxed(&page->flags) >> PG_HEAD) & 1;
}

static inline uint64_t order_word(const struct page *head)
{
	return a64_load_relaxed(&((const struct folio *)head)->_flags_1) & 0xff;
}

/* Head and size of the folio that holds a page. */
static inline uint64_t folio_at(const struct page *map, uint64_t pfn, uint64_t *head)
{
	uint64_t word = word_at(map, pfn);

	*head = head_of(pfn, word);
	if (word & 1)
		return 1ULL << (ctz64(word & ~1ULL) - 6);
	return is_head(&map[pfn]) ? 1ULL << order_word(&map[pfn]) : 1;
}

/* One compare says "below what is dropped" and "nothing would be left". True is an error. */
static inline int put_small(struct page *page, uint64_t pins)
{
	uint32_t amount = (uint32_t)pins << PIN_SHIFT;

	return mm_unlikely(a32_fetch_sub_acq_rel(&page->_refcount, amount) <= amount);
}

static inline int put_large(struct page *head, uint64_t pins)
{
	uint32_t amount = (uint32_t)pins;

	if (mm_unlikely(a32_fetch_sub_acq_rel(&((struct folio *)head)->_pincount, amount) < amount))
		return 1;
	return mm_unlikely(a32_fetch_sub_acq_rel(&head->_refcount, amount) <= amount);
}

int64_t peer_page(struct page *map, const uint64_t *pfns, uint64_t n, uint64_t zero_pfn)
{
	uint64_t i, skipped = 0;

	for (i = 0; i < n; i++) {
		uint64_t pfn = pfns[i], head;

		if (mm_unlikely(pfn == 0 || pfn == zero_pfn)) {
			skipped++;
			continue;
		}
		head = head_of(pfn, word_at(map, pfn));
		if (is_head(&map[head]) ? put_large(&map[head], 1) : put_small(&map[head], 1))
			return -1 - (int64_t)i;
	}
	return (int64_t)(n - skipped);
}

int64_t peer_head(struct page *map, const uint64_t *pfns, uint64_t n, uint64_t zero_pfn)
{
	uint64_t i = 0, j, skipped = 0;

	while (i < n) {
		uint64_t head = head_of(pfns[i], word_at(map, pfns[i]));

		/* PFN 0 is a page of its own, so that NULL ends a group without a test. */
		for (j = i + 1; j < n; j++)
			if (head_of(pfns[j], word_at(map, pfns[j])) != head)
				break;
		if (mm_unlikely(head == 0 || head == zero_pfn))
			skipped += j - i;
		else if (is_head(&map[head]) ? put_large(&map[head], j - i) : put_small(&map[head], j - i))
			return -1 - (int64_t)i;
		i = j;
	}
	return (int64_t)(n - skipped);
}

/* First index from i + 1 on whose entry is no page of [head, head + nr_pages). nr_pages is a power of two and head a
 * multiple of it, so that an OR of differences is below it exactly when each of them is. 32 entries become vectors;
 * blocks of 8 or 16 do not. */
static inline uint64_t run_end(const uint64_t *pfns, uint64_t i, uint64_t n, uint64_t head, uint64_t nr_pages)
{
	uint64_t different;
	int k;

	i++;
	if (nr_pages > SMALL_FOLIO) {
		for (; i + 32 <= n; i += 32) {
			for (different = 0, k = 0; k < 32; k++)
				different |= pfns[i + k] ^ head;
			if (different >= nr_pages)
				break;
		}
		for (; i + 8 <= n; i += 8) {
			for (different = 0, k = 0; k < 8; k++)
				different |= pfns[i + k] ^ head;
			if (different >= nr_pages)
				break;
		}
	}
	while (i < n && (pfns[i] ^ head) < nr_pages)
		i++;
	return i;
}

int64_t peer_run(struct page *map, const uint64_t *pfns, uint64_t n, uint64_t zero_pfn)
{
	uint64_t i = 0, j, count = 1, fetched = 0, skipped = 0, at, head, nr_pages;
	/* Up to here, prefetching by blocks stays within the list. */
	uint64_t inside = n > AHEAD + 2 * STEP ? n - AHEAD - 2 * STEP : 0;
	int k;

	while (i < n) {
		uint64_t pfn = pfns[i], word = word_at(map, pfn);

		if (!(word & 1) && !is_head(&map[pfn])) {
			/* Small folios have a path of their own: with shifts and blocks order 0 is 10 % behind peer_page. */
			if (i < inside)
				prefetch_write(&map[pfns[i + AHEAD]]);
			for (j = i + 1; mm_unlikely(j < n && pfns[j] == pfn); j++)
				;
			count = j - i;
			if (mm_unlikely(pfn == 0 || pfn == zero_pfn))
				skipped += count;
			else if (put_small(&map[pfn], count))
				return -1 - (int64_t)i;
			i = j;
			continue;
		}
		if (count < SHORT_GROUP && i + AHEAD >= fetched && i < inside) {
			if (fetched < i)
				fetched = i;
			do {
				for (k = 0; k < STEP; k++)
					prefetch_write(&map[pfns[fetched + k]]);
				fetched += STEP;
			} while (fetched <= i + AHEAD);
		}
		nr_pages = word & 1 ? 1ULL << (ctz64(word & ~1ULL) - 6) : 1ULL << order_word(&map[pfn]);
		head = pfn & ~(nr_pages - 1);
		j = run_end(pfns, i, n, head, nr_pages);
		count = j - i;
		if (count >= SHORT_GROUP && j + 2 * count < n) {
			at = pfns[j + 2 * count];
			prefetch_read(&map[at]);
			at &= ~(nr_pages - 1);
			prefetch_write(&map[at]);
			prefetch_write(&map[at + 1]);
		}
		if (put_large(&map[head], count))
			return -1 - (int64_t)i;
		i = j;
	}
	return (int64_t)(n - skipped);
}

int64_t peer_range(struct page *map, uint64_t pfn, uint64_t n, uint64_t zero_pfn)
{
	uint64_t start = pfn, end = pfn + n, inside = n > AHEAD ? end - AHEAD : start, skipped = 0;

	while (pfn < end) {
		uint64_t head, nr_pages = folio_at(map, pfn, &head), count = head + nr_pages - pfn;

		if (count > end - pfn)
			count = end - pfn;
		if (nr_pages == 1) {
			if (pfn < inside)
				prefetch_write(&map[pfn + AHEAD]);
			if (mm_unlikely(pfn == zero_pfn))
				skipped++;
			else if (put_small(&map[pfn], 1))
				return -1 - (int64_t)(pfn - start);
		} else {
			/* Further than in a list: where a range goes on is no guess. 2 groups on: 0.063 ns/page, 8: 0.048. */
			if (pfn + 8 * count + 1 < end) {
				prefetch_write(&map[pfn + 8 * count]);
				prefetch_write(&map[pfn + 8 * count + 1]);
			}
			if (put_large(&map[head], count))
				return -1 - (int64_t)(pfn - start);
		}
		pfn += count;
	}
	return (int64_t)(n - skipped);
}
